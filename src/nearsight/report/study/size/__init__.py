"""Does a larger model need more data, or more CutMix, to become local?"""
