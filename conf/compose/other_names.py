"""What other trainers call our settings, for the message about an unknown one."""

from collections.abc import Mapping

OTHER_NAMES: Mapping[str, str] = {
    other: setting
    for setting, others in {
        "model.path": "model_path model_name model_name_or_path pretrained pretrain hf_checkpoint checkpoint_path",
        "model.dtype": "precision bf16 fp16 torch_dtype param_dtype",
        "data.train": "dataset dataset_name data_path prompt_data train_data train_dataset train_file train_files",
        "data.heldout": "eval_data eval_dataset eval_prompt_data val_data val_files validation_data test_data",
        "data.max_prompt_tokens": "max_prompt_length max_prompt_len prompt_max_len max_input_length max_seq_len",
        "algo.groups_per_step": "batch_size global_batch_size train_batch_size rollout_batch_size prompts_per_step num_prompts",
        "algo.completions_per_group": "group_size num_generations num_samples n_samples n_samples_per_prompt rollout_n n "
        "rollouts_per_example samples_per_prompt",
        "algo.minibatches": "num_minibatches ppo_epochs num_steps_per_rollout gradient_steps ppo_mini_batch_size mini_batch_size",
        "algo.policy_loss": "loss loss_type loss_fn policy_loss_fn",
        "algo.advantage": "adv_estimator advantage_estimator",
        "algo.clip_low": "epsilon epsilon_low eps_clip clip_eps clip_range clip_ratio cliprange clip_ratio_low clip",
        "algo.clip_high": "epsilon_high eps_clip_high clip_ratio_high",
        "algo.kl_coef": "beta kl_beta kl_loss_coef kl_penalty kl_weight init_kl_coef kl",
        "algo.entropy_coef": "entropy_coeff entropy_bonus ent_coef",
        "algo.loss_normalisation": "loss_agg_mode loss_normalization loss_reduction",
        "algo.drop_no_signal": "dynamic_sampling filter_groups",
        "algo.behaviour_cap": "tis_cap tis_imp_ratio_cap is_clip importance_cap vllm_importance_sampling_cap",
        "rollout.max_staleness": "staleness max_lag async_level max_async_level max_off_policy_steps off_policy_steps",
        "rollout.max_completion_tokens": "max_tokens max_new_tokens max_completion_length max_response_length response_length "
        "max_gen_len generate_max_len rollout_max_response_len max_length",
        "rollout.engines": "num_engines num_workers n_workers inference_workers",
        "rollout.engine_tp": "rollout_tp vllm_tensor_parallel_size rollout_num_gpus_per_engine",
        "rollout.concurrency": "max_num_seqs max_running_requests max_concurrency",
        "trainer.steps": "max_steps num_steps total_steps total_training_steps num_rollout iterations num_epochs "
        "num_train_epochs total_epochs",
        "trainer.tp": "tensor_parallel tensor_parallel_size tensor_model_parallel_size tp_size",
        "trainer.pp": "pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size pp_size",
        "trainer.cp": "context_parallel_size cp_size",
        "trainer.dp": "data_parallel_size dp_size",
        "trainer.recompute": "gradient_checkpointing activation_checkpointing recompute_granularity",
        "trainer.tokens_per_microbatch": "micro_batch_size per_device_train_batch_size max_tokens_per_gpu "
        "ppo_max_token_len_per_gpu",
        "trainer.lr": "learning_rate actor_lr actor_learning_rate",
        "trainer.lr_schedule": "lr_scheduler lr_scheduler_type lr_decay_style scheduler",
        "trainer.warmup_steps": "warmup lr_warmup_steps lr_warmup_iters num_warmup_steps warmup_ratio",
        "trainer.clip_grad": "grad_clip max_grad_norm gradient_clipping max_norm",
        "trainer.checkpoint_every": "save_steps save_freq save_interval checkpoint_interval save_every",
        "trainer.checkpoints_kept": "save_total_limit max_ckpt_num",
        "trainer.eval_every": "eval_steps eval_freq eval_interval test_freq val_interval",
        "trainer.wandb_project": "wandb project project_name report_to",
        "reward.judges": "num_judges reward_workers num_reward_workers",
        "cluster.gpus_per_node": "gpus num_gpus n_gpus n_gpus_per_node num_gpus_per_node",
        "cluster.nodes": "num_nodes nnodes n_nodes",
        "name": "run_name exp_name experiment_name",
        "output": "output_dir save_dir out_dir default_local_dir",
        "resume": "resume_from resume_from_checkpoint load",
    }.items()
    for other in others.split()
}
