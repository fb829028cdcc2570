"""What people see: findings on the terminal, progress, lists, the HTML page. Start with `console` and `page`."""
