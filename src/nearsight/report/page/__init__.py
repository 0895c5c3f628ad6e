"""One HTML file that says what was found, shows it, and holds everything needed to check it.

The page makes no request: charts, figures, style and data are in the file, and a content policy forbids the rest.
"""
