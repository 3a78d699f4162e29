"""The command line, `lapa2`: arguments in, one call, words out."""
