"""How stages run: the only code that touches tables on disk or the terminal."""
