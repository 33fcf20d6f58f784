"""One model on several ranks: data-parallel MLPs, embedding tables divided by TorchRec.

``torchrun --nproc-per-node R -m dlrm_core train -f FILE`` comes here (:mod:`.command`), and so
do the measured runs of the ``scaling`` notebook (:mod:`.launch`). See docs/scaling.md.
"""
