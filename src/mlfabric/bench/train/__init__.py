"""`mlfabric bench train`: how soon each way of exchanging updates brings a real model to a target accuracy.

`entries` names the contenders, `worker` is what runs on each host of a lab, `running` makes one run and
`campaign` many of them, `judging` decides what they show, `report` and `plots` print it.
"""
