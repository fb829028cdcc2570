"""Moving the pin to another commit of open-instruct, in a clone: start with `move.move`."""
