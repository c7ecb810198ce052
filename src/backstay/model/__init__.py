"""What is kept: frozen values whose constructors refuse impossible ones. No I/O, no clock."""
