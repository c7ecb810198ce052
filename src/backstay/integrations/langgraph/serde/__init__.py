"""What LangGraph's serializers write, read and written without their trust: ``SafeSerializer``, ``ExactSerializer``."""
