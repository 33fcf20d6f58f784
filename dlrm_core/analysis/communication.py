"""What ranks exchange in a hybrid-parallel DLRM: bytes of each collective, per sharding.

MLPs are data parallel (their gradients are all-reduced), embedding tables model parallel
(pooled vectors and their gradients change hands), after Naumov et al. 2019
(arXiv:1906.00091), section 4, and Kalamkar et al. 2020 (arXiv:2005.04680), section II.

Tables that the measuring side writes (records under these keys of ``scaling.json``) and that
everything in this room takes as pandas frames. A column in brackets may be absent.

``runs``: one row a measured configuration
    ``run`` (int), ``ranks``, ``batch_size`` (samples of an iteration over all ranks),
    ``scaling`` ("strong", "weak" or ""), ``sharding`` (name, see ``sharding.SHARDINGS``, or
    "mixed"), ``threads`` (of one rank), ``nodes``, ``backend`` ("gloo", "nccl"), [``change``]
    (leaves that differ from the file's parameters).
``placement``: which rank holds what
    ``run``, ``table``, ``kind`` ("table_wise", "row_wise", "column_wise", "replicated"),
    ``rank``, ``rows``, ``columns`` (extent of that rank's shard).
``iterations``: wall clock of one iteration on one rank, steady ones only
    ``run``, ``rank``, ``iteration``, ``time_ms``.
``parts``: time of the step's thread in each part, communication among them
    ``run``, ``rank``, ``iteration``, ``component``, ``phase``, ``time_ms``. ``component`` is
    "communication" for time in which the thread waits for, or drives, a collective; a part's
    own rows are without it.
``collectives``: one row a collective a rank took part in
    ``run``, ``rank``, ``iteration``, ``kind`` ("allreduce", "alltoall", "allgather",
    "reduce_scatter", "broadcast"), ``what`` ("dense gradients", "pooled vectors", "pooled
    gradients", "indices", "table gradients"), ``bytes``, ``time_ms`` (from its call until it
    is done; waiting for other ranks included), ``exposed_ms`` (time of those in which the
    step's thread had nothing else to do), [``start_ms``] (since the iteration's start).
``link_probe``: collectives alone, nothing computed beside them
    ``collective`` (as ``kind``), ``ranks``, ``bytes``, ``time_ms`` (slowest rank; one row a
    repetition), [``backend``].
``compute_profile``: parts of a process that exchanges nothing, ``concurrent`` such processes
    at once on the same node
    ``concurrent`` (int), ``batch_size`` (samples of one process), ``component``, ``phase``,
    ``time_ms`` (one row an iteration or a median), [``process``], [``iteration``].

``bytes`` is the payload on one rank: the buffer of an all-reduce or a broadcast; the whole
send buffer of an all-to-all, what stays at home included; the input of a reduce-scatter; the
output of an all-gather. What leaves a rank is (ranks − 1) / ranks of the last three.
"""
