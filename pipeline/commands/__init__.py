"""One module per subcommand; what a command needs is imported when it runs, so that `--help` stays
quick.
"""
