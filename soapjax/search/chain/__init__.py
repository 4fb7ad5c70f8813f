"""The Markov chains that walk the SOAP space, and the delta program that judges their proposals."""
