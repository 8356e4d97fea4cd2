"""What a finished run says: tables for the terminal, plots, one HTML page, and files for CI."""
