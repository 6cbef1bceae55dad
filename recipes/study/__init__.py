"""The papers' study of GLUE: their settings and numbers, and the tables and charts of runs beside them."""
