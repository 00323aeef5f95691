"""Its folder is on the path of all tests below, for what several of their folders share."""
