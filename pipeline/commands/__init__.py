"""One module per subcommand; imports happen when a command runs, so that `--help` is fast."""
