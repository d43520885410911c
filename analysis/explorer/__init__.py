"""The explorer: one page in which records are filtered, drawn, compared and opened, point by point."""
