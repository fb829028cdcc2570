"""Shell scripts read as text: words, structure, variables -> the commands that they would start.

Nothing is ever run. `interpreter.read_script` is where to begin; `lexer` makes words, `syntax` structure,
`expansion` the values of variables, `conditions` the truth of tests.
"""
