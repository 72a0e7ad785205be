"""The commands of ``commlayer`` that ask about an installation or a run, and what they share.

`output` and `facts` print, for the commands of other distributions too.  `doctor`
looks at a machine, `trace` joins what the ranks have recorded and `timeline` draws it.
"""
