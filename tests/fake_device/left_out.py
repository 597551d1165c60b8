"""What the pretended device cannot show, by the reason."""

__all__ = ["LEFT_OUT"]

LEFT_OUT: dict[str, tuple[str, ...]] = {
    "counts what a loop on the CPU does; a device is given its batch one ahead": (
        "tests/data/test_counts.py::test_a_step_takes_few_calls_over_a_raw_loop",
        "tests/resume/test_epoch_order.py::test_another_order_inside_an_epoch_is_refused",
        "tests/processes/test_growth.py::test_set_up_handles_no_sample_by_itself_and_a_resume_reads_none",
        "tests/processes/test_growth.py::test_tensors_of_parameters_cost_what_they_cost_in_a_raw_loop",
    ),
    "expects the name of the CPU, or that there is no accelerator": (
        "tests/test_explain.py::test_it_says_what_is_trained",
        "tests/cli/test_launch_processes.py::test_a_file_for_gpus_is_refused_where_there_are_none",
        "tests/cli/test_selftest.py::test_a_wrong_collective_is_named",
    ),
    "compares with Accelerate, which does not know this device": (
        "tests/accelerator/test_scripts.py::test_scripts_stay_as_they_are[2",
        "tests/accelerator/test_usage.py::test_what_works_does_the_same[test_utils.torch_device]",
    ),
    "gives a model on the device, or its process group, tensors on the CPU": (
        "tests/metrics/test_logits.py::test_words_that_a_token_classifier_ignores_are_ignored",
        "tests/export/test_loading.py::test_auto_dispatch",
        "tests/distributed/test_watch.py::test_debugging_names_who_had_which_tensor",
        "tests/export/test_saving.py::test_a_replicated_model_is_written_by_process_0",
    ),
    "calls torch's `fully_shard` on a model on the CPU, which it cannot move": (
        "tests/export/test_loading.py::test_a_sharded_model_is_filled",
        "tests/export/test_saving.py::test_a_sharded_model_of_transformers_loads_with_equal_logits",
        "tests/export/test_saving.py::test_a_sharded_model_is_written_as_an_unsharded_one",
        "tests/export/test_saving.py::test_all_processes_learn_of_a_full_disk",
    ),
    "compares bits of the device with bits of the CPU": (
        "tests/export/test_fsdp.py::test_a_model_from_fsdp",
        "tests/test_docs.py::test_the_python_blocks_run_one_after_the_other[docs/migrate/raw-loop.md]",
    ),
    "its backend of collectives has no time-out that can be changed": (
        "tests/distributed/test_timeouts.py::test_a_collective_raises_after_the_time_out",
    ),
    "needs sparse tensors, which this device has not": (
        "tests/test_rules_under_stress.py::test_sparse_gradients_train_on_several_processes",
    ),
    "forks after a backward: autograd has threads for each device that is there": (
        "tests/gradient/test_contrastive.py::test_in_a_loop_of_ones_own_unequal_batches_need_a_factor",
        "tests/gradient/test_reductions.py::test_a_step_of_ones_own_may_use_single_losses_but_returns_one",
    ),
}
