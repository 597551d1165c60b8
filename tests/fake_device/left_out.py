"""What the pretended device cannot show, by the reason."""

__all__ = ["LEFT_OUT"]

LEFT_OUT: dict[str, tuple[str, ...]] = {
    "counts what a loop on the CPU does; a device is given its batch one ahead": (
        "tests/test_counts.py::test_a_step_takes_few_calls_over_a_raw_loop",
        "tests/test_epoch_order.py::test_another_order_inside_an_epoch_is_refused",
        "tests/test_growth.py::test_set_up_handles_no_sample_by_itself_and_a_resume_reads_none",
        "tests/test_growth.py::test_tensors_of_parameters_cost_what_they_cost_in_a_raw_loop",
    ),
    "compares bits with a loop on the CPU, whose autocast runs other operators in low precision": (
        "tests/test_parity.py::test_weights_equal_those_of_a_plain_loop[bf16",
        "tests/test_parity.py::test_weights_equal_those_of_a_plain_loop[fp16",
    ),
    "expects the name of the CPU": ("tests/test_explain.py::test_it_says_what_is_trained",),
    "needs sparse tensors, which this device has not": (
        "tests/test_rules_under_stress.py::test_sparse_gradients_train_on_several_processes",
        "tests/test_random_resumes.py::test_a_resumed_run_is_the_same_run[6]",
    ),
    "forks after a backward: autograd has threads for each device that is there": (
        "tests/test_contrastive.py::test_in_a_loop_of_ones_own_unequal_batches_need_a_factor",
        "tests/test_reductions.py::test_a_step_of_ones_own_may_use_single_losses_but_returns_one",
    ),
}
