"""The values that Backstay stores: frozen, with constructors that refuse impossible ones. No I/O, no clock."""
