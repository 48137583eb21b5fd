//! `Arch` from config.json: names, defaults and refusals, against values taken by hand from transformers 5.24.

mod shared;

use serde_json::{Value, json};
use shared::{files, shared};
use std::path::Path;
use temper_config::{Arch, ModelType, Result};

fn dense(model_type: &str) -> Value {
    json!({
        "model_type": model_type, "vocab_size": 40, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "hidden_act": "silu", "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6, "rope_theta": 5e5, "tie_word_embeddings": false, "bos_token_id": null, "eos_token_id": null
    })
}

fn moe() -> Value {
    patched(
        dense("qwen3_moe"),
        json!({ "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": true, "num_hidden_layers": 4 }),
    )
}

/// `base` with the keys of `patch`; "REMOVE" takes a key out.
fn patched(mut base: Value, patch: Value) -> Value {
    for (key, value) in patch.as_object().unwrap() {
        if value == "REMOVE" {
            base.as_object_mut().unwrap().remove(key);
        } else {
            base[key] = value.clone();
        }
    }
    base
}

fn read(config: Value) -> Result<Arch> {
    Arch::from_json(&config.to_string(), Path::new("config.json"))
}

#[track_caller]
fn refused(config: Value, words: &[&str]) {
    let message = read(config).unwrap_err().to_string();
    for word in words.iter().chain(&["config.json"]) {
        assert!(message.contains(word), "\"{word}\" is not in: {message}");
    }
}

#[test]
fn every_key_is_read() {
    let arch = read(patched(
        moe(),
        json!({
            "attention_bias": true, "tie_word_embeddings": true, "initializer_range": 0.3, "torch_dtype": "bfloat16", "bos_token_id": 1,
            "eos_token_id": [2, 3, 2], "decoder_sparse_step": 2, "mlp_only_layers": [3], "router_aux_loss_coef": 0.5,
            "output_router_logits": true, "rms_norm_eps": 1e-5
        }),
    ))
    .unwrap();
    assert_eq!(arch.model_type, ModelType::Qwen3Moe);
    let sizes = (arch.hidden, arch.layers, arch.heads, arch.kv_heads, arch.head_dim, arch.intermediate, arch.vocab, arch.max_positions);
    assert_eq!(sizes, (16, 4, 2, 1, 8, 12, 40, 256));
    assert_eq!((arch.norm_eps, arch.rope_theta, arch.init_std), (1e-5, 5e5, 0.3));
    assert_eq!((arch.tied, arch.qkv_bias, arch.out_bias, arch.mlp_bias, arch.qk_norm), (true, true, true, false, true));
    assert_eq!((arch.dtype.as_deref(), arch.bos, arch.eos.as_slice()), (Some("bfloat16"), Some(1), [2, 3].as_slice()));
    assert_eq!((0..4).map(|i| arch.is_moe_layer(i)).collect::<Vec<_>>(), [false, true, false, false]);
    let experts = arch.moe.unwrap();
    assert_eq!((experts.experts, experts.top_k, experts.intermediate, experts.normalise), (4, 2, 8, true));
    assert_eq!((experts.aux_coef, experts.aux_in_loss), (0.5, true));
    assert_eq!(arch.notices, Vec::<String>::new());
}

#[test]
fn biases_and_norms_follow_the_family() {
    let flags = |name, patch| {
        let a = read(patched(dense(name), patch)).unwrap();
        (a.qkv_bias, a.out_bias, a.mlp_bias, a.qk_norm)
    };
    assert_eq!(flags("llama", json!({})), (false, false, false, false));
    assert_eq!(flags("llama", json!({ "attention_bias": true, "mlp_bias": true })), (true, true, true, false));
    // Qwen2 has its biases whatever a file says.
    assert_eq!(flags("qwen2", json!({ "attention_bias": false })), (true, false, false, false));
    assert_eq!(flags("qwen3", json!({ "mlp_bias": true })), (false, false, false, true));
}

#[test]
fn absent_keys_take_the_class_defaults_and_say_so() {
    let bare = json!({ "model_type": "llama", "vocab_size": 40, "hidden_size": 64, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4 });
    let arch = read(bare.clone()).unwrap();
    assert_eq!((arch.kv_heads, arch.head_dim, arch.max_positions, arch.tied), (4, 16, 2048, false));
    assert_eq!((arch.norm_eps, arch.rope_theta, arch.init_std), (1e-6, 10000.0, 0.02));
    assert_eq!((arch.bos, arch.eos.as_slice()), (Some(1), [2].as_slice()));
    for key in ["num_key_value_heads", "rms_norm_eps", "rope_theta", "max_position_embeddings"] {
        assert!(arch.notices.iter().any(|n| n.contains(key)), "{key} in {:?}", arch.notices);
    }
    let qwen = patched(bare, json!({ "model_type": "qwen3", "num_attention_heads": 64 }));
    let arch = read(qwen.clone()).unwrap();
    assert_eq!((arch.kv_heads, arch.head_dim, arch.max_positions, arch.bos), (32, 128, 32768, None));
    let null = read(patched(qwen.clone(), json!({ "num_key_value_heads": null, "num_attention_heads": 4, "head_dim": null }))).unwrap();
    assert_eq!((null.kv_heads, null.head_dim), (4, 16));
    // The default of 32 key/value heads cannot serve 4 query heads.
    refused(patched(qwen, json!({ "num_attention_heads": 4 })), &["num_key_value_heads", "32", "4 query heads"]);
    let experts = read(patched(moe(), json!({ "num_experts": 16, "num_experts_per_tok": "REMOVE", "norm_topk_prob": "REMOVE" }))).unwrap();
    let notices = experts.notices.join("\n");
    let experts = experts.moe.unwrap();
    assert_eq!((experts.top_k, experts.normalise, experts.sparse_step, experts.aux_coef), (8, false, 1, 0.001));
    assert!(notices.contains("norm_topk_prob") && notices.contains("num_experts_per_tok"), "{notices}");
}

#[test]
fn rope_theta_is_found_in_every_layout() {
    let theta = |patch| {
        let arch = read(patched(dense("qwen3"), patched(json!({ "rope_theta": "REMOVE" }), patch))).unwrap();
        (arch.rope_theta, arch.notices.join("\n"))
    };
    let none = String::new();
    assert_eq!(theta(json!({ "rope_theta": 500000 })), (5e5, none.clone()));
    assert_eq!(theta(json!({ "rope_parameters": { "rope_type": "default", "rope_theta": 5e5 } })), (5e5, none.clone()));
    assert_eq!(theta(json!({ "rope_scaling": { "rope_type": "default", "rope_theta": 5e5 } })), (5e5, none.clone()));
    assert_eq!(theta(json!({ "rope_theta": 5e5, "rope_scaling": { "type": "default" } })), (5e5, none.clone()));
    assert_eq!(theta(json!({ "rope_theta": 5e5, "rope_parameters": { "rope_theta": 5e5 }, "rope_scaling": null })), (5e5, none));
    let (taken, notice) = theta(json!({ "rope_theta": 1e4, "rope_parameters": { "rope_type": "default", "rope_theta": 5e5 } }));
    assert_eq!(taken, 5e5);
    assert!(notice.contains("rope_parameters.rope_theta is 500000") && notice.contains("rope_theta is 10000"), "{notice}");
    let (taken, notice) = theta(json!({}));
    assert_eq!(taken, 1e4);
    assert!(notice.contains("rope_theta is absent"), "{notice}");
}

#[test]
fn rope_other_than_plain_is_refused_by_name() {
    for kind in ["linear", "dynamic", "yarn", "longrope", "llama3", "proportional"] {
        for (object, key) in [("rope_scaling", "type"), ("rope_scaling", "rope_type"), ("rope_parameters", "rope_type")] {
            let config = patched(dense("qwen3"), json!({ object: { key: kind, "factor": 4.0 } }));
            refused(config, &[&format!("{object}.{key}"), &format!("\"{kind}\"")]);
        }
    }
    refused(patched(dense("llama"), json!({ "rope_scaling": { "factor": 2.0 } })), &["rope_scaling.factor", "2.0"]);
    refused(patched(dense("llama"), json!({ "partial_rotary_factor": 0.5 })), &["partial_rotary_factor", "0.5"]);
    refused(patched(dense("llama"), json!({ "rope_parameters": { "full_attention": { "rope_theta": 1e4 } } })), &["full_attention"]);
    refused(patched(dense("llama"), json!({ "rope_theta": 0 })), &["rope_theta", "found 0"]);
}

#[test]
fn expert_counts_by_either_name_but_not_two_values() {
    let new = patched(moe(), json!({ "num_experts": "REMOVE", "num_local_experts": 4 }));
    assert_eq!(read(new).unwrap(), read(moe()).unwrap());
    assert_eq!(read(patched(moe(), json!({ "num_local_experts": 4 }))).unwrap(), read(moe()).unwrap());
    refused(patched(moe(), json!({ "num_local_experts": 8 })), &["num_experts is 4", "num_local_experts is 8"]);
    refused(patched(moe(), json!({ "num_experts": null })), &["num_experts", "num_local_experts", "missing"]);
    refused(patched(moe(), json!({ "num_experts_per_tok": 5 })), &["num_experts_per_tok", "5 experts per token of 4"]);
}

#[test]
fn head_dim_defaults_differ_between_dense_and_moe() {
    let head_dim = |config, patch| read(patched(config, patch)).map(|a| a.head_dim);
    assert_eq!(head_dim(dense("qwen3"), json!({ "head_dim": "REMOVE" })).unwrap(), 128);
    assert_eq!(head_dim(dense("qwen3"), json!({ "head_dim": null })).unwrap(), 8);
    for config in [moe(), dense("llama"), dense("qwen2")] {
        assert_eq!(head_dim(config.clone(), json!({ "head_dim": "REMOVE" })).unwrap(), 8);
        assert_eq!(head_dim(config.clone(), json!({ "head_dim": null })).unwrap(), 8);
        assert_eq!(head_dim(config, json!({ "head_dim": 6 })).unwrap(), 6);
    }
    refused(patched(moe(), json!({ "head_dim": 7 })), &["head_dim", "7 is odd"]);
    refused(patched(dense("llama"), json!({ "head_dim": null, "hidden_size": 17 })), &["head_dim", "17"]);
}

#[test]
fn sliding_windows_in_use_are_refused_and_others_are_not() {
    let on = json!({ "use_sliding_window": true, "sliding_window": 128, "max_window_layers": 1 });
    for name in ["qwen2", "qwen3"] {
        refused(patched(dense(name), on.clone()), &["sliding_window", "128"]);
        refused(patched(dense(name), json!({ "use_sliding_window": true, "max_window_layers": 1 })), &["4096"]);
        for off in [
            json!({ "use_sliding_window": false, "sliding_window": 128 }),
            json!({ "use_sliding_window": true, "sliding_window": null }),
            json!({ "use_sliding_window": true, "sliding_window": 128, "max_window_layers": 2 }),
            json!({ "use_sliding_window": true, "sliding_window": 128, "layer_types": ["full_attention", "full_attention"] }),
        ] {
            read(patched(dense(name), off)).unwrap();
        }
    }
    // qwen3_moe slides in all layers.
    refused(
        patched(moe(), json!({ "use_sliding_window": true, "sliding_window": 128, "max_window_layers": 4 })),
        &["sliding_window", "128"],
    );
    refused(patched(dense("llama"), json!({ "sliding_window": 128 })), &["sliding_window", "128"]);
    read(patched(dense("llama"), json!({ "sliding_window": null }))).unwrap();
    let types = json!({ "layer_types": ["full_attention", "sliding_attention"] });
    refused(patched(dense("qwen3"), types), &["layer_types", "sliding_attention"]);
    refused(patched(dense("qwen3"), json!({ "layer_types": ["full_attention"] })), &["layer_types", "1 entries for 2 layers"]);
}

#[test]
fn what_temper_does_not_run_is_refused_by_name() {
    refused(patched(dense("qwen3"), json!({ "hidden_act": "gelu" })), &["hidden_act", "gelu", "silu"]);
    refused(patched(dense("qwen3"), json!({ "quantization_config": { "quant_method": "fp8" } })), &["quantization_config", "fp8"]);
    refused(dense("mistral"), &["model_type", "unknown", "mistral", "llama, qwen2, qwen3, qwen3_moe"]);
    for name in ["qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe"] {
        refused(dense(name), &["model_type", name, "not yet supported"]);
    }
    refused(patched(dense("qwen3"), json!({ "model_type": "REMOVE" })), &["model_type", "missing"]);
    refused(patched(moe(), json!({ "shared_expert_intermediate_size": 8 })), &["shared_expert_intermediate_size"]);
}

#[test]
fn impossible_sizes_are_refused() {
    for key in ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"] {
        for bad in [json!(0), json!(-1), json!(1.5), json!("16"), json!(1e300), json!(u64::MAX), json!([])] {
            refused(patched(dense("qwen3"), json!({ key: bad })), &[key]);
        }
        refused(patched(dense("qwen3"), json!({ key: "REMOVE" })), &[key, "missing"]);
    }
    refused(
        patched(dense("qwen3"), json!({ "num_attention_heads": 3, "num_key_value_heads": 2 })),
        &["2 key/value heads", "3 query heads"],
    );
    refused(patched(moe(), json!({ "decoder_sparse_step": 0 })), &["decoder_sparse_step"]);
    let huge = json!({ "hidden_size": 1 << 20, "moe_intermediate_size": 1 << 24, "num_experts": 1 << 16, "num_hidden_layers": 10000 });
    refused(patched(moe(), huge), &["parameters"]);
}

#[test]
fn tokens_outside_the_vocabulary_are_left_out_with_a_notice() {
    let arch = read(patched(dense("qwen3"), json!({ "eos_token_id": [7, 99999, -1], "bos_token_id": 40 }))).unwrap();
    assert_eq!((arch.eos.as_slice(), arch.bos), ([7].as_slice(), None));
    assert!(arch.notices.iter().any(|n| n.contains("99999") && n.contains("eos_token_id")), "{:?}", arch.notices);
    refused(patched(dense("qwen3"), json!({ "eos_token_id": "</s>" })), &["eos_token_id", "</s>"]);
}

#[test]
fn text_that_is_no_config_is_a_clear_error() {
    for text in ["", "[]", "3", "{", "{\"model_type\": \"qwen3\",}", "\u{feff}[]", &"[".repeat(100_000)] {
        let message = Arch::from_json(text, Path::new("m/config.json")).unwrap_err().to_string();
        assert!(message.starts_with("m/config.json"), "{message}");
    }
    let missing = Arch::from_folder(Path::new("no/such")).unwrap_err().to_string();
    assert!(missing.contains("no/such/config.json"), "{missing}");
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), b"{\"a\": \"\xff\"}").unwrap();
    assert!(Arch::from_folder(dir.path()).unwrap_err().to_string().contains("not UTF-8 at byte 7"));
    std::fs::write(dir.path().join("config.json"), format!("\u{feff}{}", dense("qwen3"))).unwrap();
    assert_eq!(Arch::from_folder(dir.path()).unwrap().vocab, 40);
}

#[test]
fn real_configs_are_read_or_refused_by_name() {
    let Some(root) = shared("facts/configs") else { return };
    let read = |name: &str| Arch::from_json(&std::fs::read_to_string(root.join(name)).unwrap(), Path::new(name));
    for path in files(&root, |name| name.ends_with(".json")) {
        let name = path.file_name().unwrap().to_str().unwrap();
        match read(name) {
            Ok(arch) => assert_eq!(arch.notices, Vec::<String>::new(), "{name}"),
            Err(e) if name.contains("3.1-8B") => assert!(e.to_string().contains("llama3"), "{e}"),
            Err(e) => assert!(e.to_string().contains("not yet supported"), "{name}: {e}"),
        }
    }
    let big = read("Qwen3-235B-A22B.config.json").unwrap();
    assert_eq!((big.layers, big.heads, big.kv_heads, big.head_dim, big.rope_theta), (94, 64, 4, 128, 1e6));
    assert_eq!(big.moe.map(|m| (m.experts, m.top_k, m.intermediate, m.normalise)), Some((128, 8, 1536, true)));
    let small = read("SmolLM2-135M-Instruct.config.RECONSTRUCTED.json").unwrap();
    assert_eq!((small.heads, small.kv_heads, small.head_dim, small.tied, small.rope_theta), (9, 3, 64, true, 1e5));
}

#[test]
fn fixture_configs_are_read() {
    let Some(root) = shared("fixtures") else { return };
    for name in ["llama", "qwen2", "qwen3_dense", "qwen3_dense_tied", "qwen3_moe", "qwen3_moe_sparse_step"] {
        let arch = Arch::from_folder(&root.join(name)).unwrap();
        assert_eq!((arch.hidden, arch.vocab, arch.notices.len()), (48, 320, 0), "{name}: {:?}", arch.notices);
    }
    let sparse = Arch::from_folder(&root.join("qwen3_moe_sparse_step")).unwrap();
    assert_eq!((0..4).map(|i| sparse.is_moe_layer(i)).collect::<Vec<_>>(), [false, true, false, true]);
    assert_eq!(Arch::from_folder(&root.join("qwen3_dense_tied")).unwrap().head_dim, 24);
    for name in ["qwen3_5", "qwen3_5_moe", "qwen3_next"] {
        assert!(Arch::from_folder(&root.join(name)).unwrap_err().to_string().contains("not yet supported"));
    }
}

#[test]
fn reported_faults_come_out_right() {
    let Some(root) = shared("cases/27-rope-config-forms") else { return };
    let arch = |name: &str| Arch::from_folder(&root.join(name));
    for name in ["new", "old", "both-agree", "scaling-default", "conflict"] {
        assert_eq!(arch(name).unwrap().rope_theta, 5e5, "{name}");
    }
    assert_eq!(arch("conflict").unwrap().notices.len(), 1);
    assert_eq!(arch("absent").unwrap().rope_theta, 1e4);
    for (name, kind) in [("yarn-old", "yarn"), ("yarn-new", "yarn"), ("linear", "linear")] {
        assert!(arch(name).unwrap_err().to_string().contains(kind));
    }
    let Some(root) = shared("cases/29-moe-and-head-dim-names") else { return };
    let arch = |name: &str| Arch::from_folder(&root.join(name));
    for name in ["old-per-expert", "new-per-expert", "new-fused", "head-dim-absent", "head-dim-null", "norm-absent"] {
        let read = arch(name).unwrap();
        let moe = read.moe.unwrap();
        assert_eq!((read.head_dim, moe.experts, moe.normalise), (8, 4, name != "norm-absent"), "{name}");
    }
    let message = arch("both-names-disagree").unwrap_err().to_string();
    assert!(message.contains("num_experts is 8") && message.contains("num_local_experts is 4"), "{message}");
    assert_eq!(arch("dense-head-dim-null").unwrap().head_dim, 8);
    assert_eq!(arch("dense-head-dim-absent").unwrap().head_dim, 128);
    assert_eq!(arch("dense-head-dim-wrong").unwrap().head_dim, 16);
}
