"""Sources with recorded and synthetic speech, and the functions that turn sound into spectrograms.

Only synthesis needs a package of its own, espeakng-loader (the extra `speech`), or the system's espeak-ng.
"""
