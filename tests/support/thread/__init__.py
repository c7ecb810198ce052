"""Operations that are interrupted at every line."""
