"""What pictures and tables have in common, in papers and on the page: titles of metrics, and colours."""
