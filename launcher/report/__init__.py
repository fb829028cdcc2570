"""What people see: terminal output, progress, lists, the HTML page.

Start with `console` and `page`.
"""
