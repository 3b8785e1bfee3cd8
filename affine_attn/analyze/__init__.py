"""How models attend: statistics of all layers and heads on given text, the files they are kept in, and figures."""
