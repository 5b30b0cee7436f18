"""Four workers fit a line together. Runs in about a second: python examples/first.py"""

import numpy as np

import mlfabric as mf

with mf.local(workers=4) as fabric:  # between hosts: mf.join("10.0.0.1:7070", job="line", name="w0")

    def train(worker: mf.Fabric) -> None:
        rng = np.random.default_rng(int(worker.name[1:]))
        worker.publish({"slope": np.zeros(2)}, apply=mf.SGD(lr=0.1))
        for _ in range(50):
            slope = worker.pull().arrays["slope"]
            x = rng.standard_normal((32, 2))
            error = x @ (slope - [3.0, -1.0])
            worker.push({"slope": x.T @ error / 32}).result()

    fabric.run(train)
    print("slope:", fabric.pull().arrays["slope"].round(3))  # [ 3. -1.]
