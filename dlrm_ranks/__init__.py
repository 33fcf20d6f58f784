"""One model on several ranks: data-parallel MLPs, embedding tables divided by TorchRec.

``torchrun --nproc-per-node R -m dlrm_core train -f FILE`` comes to :func:`.trainer.train`; the
measured runs of the ``scaling`` notebook use the same tables and step. See docs/scaling.md.
"""
