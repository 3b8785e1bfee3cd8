"""How exact and how fast the engines are on this machine."""
