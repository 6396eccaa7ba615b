"""Sound as data: the sources with recorded and synthetic speech, and what makes pictures of sound.

Only synthesis needs a package of its own, espeakng-loader (the extra `speech`), or the system's espeak-ng.
"""
