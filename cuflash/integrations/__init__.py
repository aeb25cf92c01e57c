"""cuflash inside other libraries, active only where it is asked for."""
