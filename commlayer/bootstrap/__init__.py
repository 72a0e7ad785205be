"""From a configuration to a communicator, and to the end of the process."""
