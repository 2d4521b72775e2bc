"""Names that only look unused, by who uses them. Checked by nobody but `scripts/check`; keep it short."""

_ = object()

# areal_dta/batcher/service.py finds its handlers by name
_._hello, _._reject, _._heartbeat, _._published, _._commit, _._eval_start, _._eval_result
# Megatron-core calls or reads these
_._results_queue, _._get_save_and_finalize_callbacks, _.wait_stream, _.wait_event, _.synchronize, _.record_event
_.input_layernorm, _.pre_mlp_layernorm, _.core_attention, _.activation_func, _.q_layernorm, _.k_layernorm
_.recompute_granularity, _.recompute_method, _.recompute_num_layers
# AReaL's TrainEngine and executor interfaces
(
    _.initialized,
    _.optimizer_zero_grad,
    _.lr_scheduler_step,
    _.forward_batch,
    _.aggregate_fn,
    _.mb_list,
    _.process_output_fn,
)
_.forward_only
_.connect_engine, _.onload, _.get_device_stats, _.poll_wait_time
# tau2, tokenizers and http.server call or read these
_.get_init_state, _.pre_tokenizer, _.do_GET, _.do_POST, _.log_message
# records that are written out whole (JSON, HF config), or read by the dashboard's script
_.worst_parameter, _.recomputed_tokens, _.num_messages, _.last_exit
_.intermediate_size, _.num_hidden_layers, _.num_attention_heads, _.num_key_value_heads, _.max_position_embeddings
# context managers and pytest
_.exc, _.pytestmark, _.linger
# logging reads it
_.disabled
# tests: a page for people to look at, classes and values that code under test finds by name
_.screenshot, _.WantsMore, _.judge, _.completion_ids, _.prompt_ids
