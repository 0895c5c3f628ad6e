"""Is it the cut, the mix, or the label?"""
