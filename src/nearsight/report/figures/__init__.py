"""The figures of S1, of the page and of the further measurements, as matplotlib figures.

They are made with matplotlib's object interface only: no window, no global current figure, usable from any thread.
"""
