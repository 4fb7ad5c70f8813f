"""Every rule of costs once, as a pure function of gathered records; no arrays of a whole problem here."""
