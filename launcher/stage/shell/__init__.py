"""Shell scripts read as text: words, structure, variables -> the commands that they would start.

No script is run. Begin with `interpreter.read_script`. `lexer` makes words, `syntax` structure,
`expansion` the values of variables, `conditions` the truth of tests.
"""
