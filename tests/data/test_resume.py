"""With a real Trainer: checkpoints, restarts and validation never change the training data."""

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from data import TextDataModule


class Recorder(lightning.LightningModule):
    """A model of one weight that keeps the batches it was given."""

    def __init__(self, fail_at=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.fail_at = fail_at
        self.train_batches, self.val_batches = [], []

    def training_step(self, batch, batch_idx):
        if batch_idx == self.fail_at:
            raise KeyError("fails on purpose")
        self.train_batches.append(batch.tolist())
        return self.weight * batch.float().mean()

    def validation_step(self, batch, batch_idx):
        self.val_batches.append(batch.tolist())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveOnException(Callback):
    def __init__(self, path):
        self.path = path

    def on_exception(self, trainer, module, error):
        trainer.save_checkpoint(self.path)


@pytest.fixture
def data(tmp_path):
    """Makes a data module of 3 batches an epoch, so that a few steps cross several epochs."""
    (tmp_path / "text.txt").write_text("".join(f"{i:03d}" for i in range(20)))

    def data():
        return TextDataModule(
            str(tmp_path / "text.txt"),
            "bytes",
            context=2,
            batch_size=8,
            val_batches=1,
            cache_dir=str(tmp_path / "cache"),
        )

    return data


@pytest.fixture
def fit(tmp_path, data):
    """Trains up to `max_steps` and returns the recorder; saves a checkpoint every `save` steps."""

    def fit(max_steps, save=None, resume=None, model=None, callbacks=(), **options):
        if save:
            checkpoint = ModelCheckpoint(
                tmp_path, filename="{step}", every_n_train_steps=save, save_top_k=-1
            )
            callbacks = [*callbacks, checkpoint]
        model = model or Recorder()
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_steps=max_steps,
            callbacks=list(callbacks),
            enable_checkpointing=bool(save),
            check_val_every_n_epoch=None,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **{"val_check_interval": 3, "num_sanity_val_steps": 1} | options,
        )
        trainer.fit(model, data(), ckpt_path=resume)
        return model

    return fit


def batches(data, steps):
    module = data()
    module.setup()
    return [module.train_batch(step).tolist() for step in steps]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_resumed_run_gets_the_batches_of_an_uninterrupted_one(fit, data, tmp_path, accumulate):
    options = {"accumulate_grad_batches": accumulate}
    whole = fit(10, save=5, **options).train_batches
    assert whole == batches(data, range(10 * accumulate))
    resumed = fit(10, resume=tmp_path / "step=5.ckpt", **options).train_batches
    assert resumed == whole[5 * accumulate :]


def test_a_run_resumed_twice_gets_the_batches_of_an_uninterrupted_one(fit, data, tmp_path):
    parts = [
        *fit(4, save=4).train_batches,
        *fit(7, save=7, resume=tmp_path / "step=4.ckpt").train_batches,
        *fit(11, resume=tmp_path / "step=7.ckpt").train_batches,
    ]
    assert parts == batches(data, range(11))


def test_validation_and_trainer_epochs_change_no_training_batch(fit, data):
    expected = batches(data, range(10))
    assert fit(10, limit_val_batches=0).train_batches == expected
    often = fit(10, val_check_interval=1)
    assert often.train_batches == expected
    assert fit(10, limit_train_batches=4, val_check_interval=2).train_batches == expected
    assert len(often.val_batches) == 11
    assert all(batch == often.val_batches[0] for batch in often.val_batches)


def test_a_run_resumed_between_trainer_epochs_goes_on(fit, data, tmp_path):
    options = {"limit_train_batches": 4, "val_check_interval": 2}
    fit(8, save=2, **options)
    expected = batches(data, range(10))
    for step in (4, 6):
        resumed = fit(10, resume=tmp_path / f"step={step}.ckpt", **options)
        assert resumed.train_batches == expected[step:], step


def test_a_run_saved_at_a_failure_goes_on_with_the_batch_that_failed(fit, data, tmp_path):
    saver = SaveOnException(tmp_path / "failed.ckpt")
    with pytest.raises(KeyError, match="on purpose"):
        fit(10, model=Recorder(fail_at=5), callbacks=[saver])
    resumed = fit(8, resume=tmp_path / "failed.ckpt").train_batches
    assert resumed == batches(data, range(5, 8))


def test_each_rank_of_a_trainer_gets_its_own_share(data, monkeypatch):
    rows = []
    for rank in range(2):
        module = data()
        module.setup()
        module.trainer = lightning.Trainer(accelerator="cpu", logger=False, barebones=True)
        monkeypatch.setattr(lightning.Trainer, "global_rank", rank)
        monkeypatch.setattr(lightning.Trainer, "world_size", 2)
        batch = next(iter(module.train_dataloader()))
        assert batch.tolist() == module.train_batch(0, rank, 2).tolist()
        rows += batch.tolist()
    module.batch_size = 16
    assert rows == module.train_batch(0).tolist()
