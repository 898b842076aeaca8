"""Logging elsewhere: a callback for Weights & Biases or MLflow is these few lines."""

import gradmem as gm


class Logged(gm.Callback):
    """Sends numbers to `log`: `wandb.log`, or `mlflow.log_metrics`."""

    def __init__(self, log, every=1000):
        self.log, self.every = log, every

    def on_batch(self, progress):
        if progress.examples % self.every == 0:
            self.log({"loss": float(progress.loss)}, step=progress.examples)

    def on_task(self, progress):
        self.log({"ACC so far": progress.acc}, step=progress.examples)


def main(log=print):
    continuum = gm.mnist_rotations(5, data="sample")
    return gm.run(gm.GEM(gm.mlp()), continuum, callbacks=[Logged(log)])


if __name__ == "__main__":
    main(lambda numbers, step: print(step, numbers))
