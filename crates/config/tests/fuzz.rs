//! No input makes the readers panic, and what they accept is inside its bounds.

use proptest::prelude::*;
use std::path::Path;
use temper_config::{Arch, Config};

const QWEN: &str = r#"{"model_type":"qwen3_moe","vocab_size":40,"hidden_size":16,"intermediate_size":12,"num_hidden_layers":2,
"num_attention_heads":2,"num_key_value_heads":1,"head_dim":8,"hidden_act":"silu","max_position_embeddings":256,"rms_norm_eps":1e-6,
"rope_parameters":{"rope_type":"default","rope_theta":1e6},"rope_scaling":null,"layer_types":["full_attention","full_attention"],
"moe_intermediate_size":8,"num_experts":4,"num_experts_per_tok":2,"norm_topk_prob":true,"mlp_only_layers":[1],"eos_token_id":[1,2]}"#;

const RUN: &str = r#"
[model]
path = "owner/name"
[data]
train = [{ path = "Cargo.toml", weight = 2.0 }]
template_args = { a = [1, 2.5, { b = "c" }] }
seq_len = 64
[train]
steps = 10
global_batch = 4
[optim]
lr = 1e-3
betas = [0.9, 0.95]
warmup = 0.1
schedule = "wsd"
"#;

/// Reads both kinds of file; what is accepted must hold its own invariants.
fn read(text: &str) {
    if let Ok(arch) = Arch::from_json(text, Path::new("config.json")) {
        assert!(arch.heads % arch.kv_heads == 0 && arch.head_dim % 2 == 0 && arch.head_dim > 0);
        assert!(arch.rope_theta.is_finite() && arch.norm_eps > 0.0);
        assert!(arch.eos.iter().all(|id| (*id as usize) < arch.vocab));
        if let Some(moe) = &arch.moe {
            assert!(moe.top_k >= 1 && moe.top_k <= moe.experts);
        }
    }
    if let Ok(resolved) = Config::from_toml(text, Path::new("Cargo.toml"), &[]) {
        let (train, optim) = (&resolved.config.train, &resolved.config.optim);
        assert!(train.global_batch % train.micro_batch == 0 && (train.steps.is_some() != train.epochs.is_some()));
        assert!(optim.lr.is_finite() && optim.min_lr <= optim.lr);
        resolved.to_json();
    }
}

fn json() -> impl Strategy<Value = serde_json::Value> {
    let leaf = prop_oneof![
        Just(serde_json::Value::Null),
        any::<bool>().prop_map(Into::into),
        any::<i64>().prop_map(Into::into),
        any::<f64>().prop_map(Into::into),
        (-3i64..70000).prop_map(Into::into),
        "\\PC{0,8}".prop_map(Into::into),
        prop_oneof![Just("default"), Just("yarn"), Just("full_attention"), Just("silu"), Just("qwen3"), Just("llama")].prop_map(Into::into),
    ];
    leaf.prop_recursive(3, 24, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Into::into),
            prop::collection::vec(("[a-z_]{1,8}", inner), 0..4)
                .prop_map(|entries| serde_json::Value::Object(entries.into_iter().collect())),
        ]
    })
}

/// Replaces the byte range by other bytes, keeping valid UTF-8 by replacing what is not.
fn mutate(text: &str, at: usize, len: usize, with: &[u8]) -> String {
    let mut bytes = text.as_bytes().to_vec();
    let start = at % (bytes.len() + 1);
    let end = (start + len).min(bytes.len());
    bytes.splice(start..end, with.iter().copied());
    String::from_utf8_lossy(&bytes).into_owned()
}

#[test]
fn the_seeds_themselves_are_accepted() {
    Arch::from_json(QWEN, Path::new("config.json")).unwrap();
    Config::from_toml(RUN, Path::new("Cargo.toml"), &[]).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_text_is_survived(text in "\\PC{0,200}") {
        read(&text);
    }

    #[test]
    fn any_bytes_of_a_file_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), &bytes).unwrap();
        let _ = Arch::from_folder(dir.path());
        let _ = Config::load(&dir.path().join("config.json"), &[]);
    }

    #[test]
    fn mutated_files_are_survived(at in any::<usize>(), len in 0usize..12, with in prop::collection::vec(any::<u8>(), 0..12)) {
        read(&mutate(QWEN, at, len, &with));
        read(&mutate(RUN, at, len, &with));
    }

    #[test]
    fn any_value_under_a_known_json_key_is_survived(pick in any::<prop::sample::Index>(), value in json()) {
        let mut config: serde_json::Value = serde_json::from_str(QWEN).unwrap();
        let keys: Vec<String> = config.as_object().unwrap().keys().cloned()
            .chain(["num_local_experts", "sliding_window", "use_sliding_window", "rope_theta", "quantization_config"].map(String::from)).collect();
        config[pick.get(&keys)] = value;
        read(&config.to_string());
    }

    #[test]
    fn any_value_under_a_known_key_is_survived(pick in any::<prop::sample::Index>(), value in json(), deep in "[a-z.=\"]{0,6}") {
        let keys = Config::keys();
        let key = pick.get(&keys).path();
        let toml = toml::Value::try_from(&value).map(|v| v.to_string()).unwrap_or(value.to_string());
        for set in [format!("{key}={toml}"), format!("{key}{deep}={toml}"), deep] {
            if let Ok(resolved) = Config::from_toml(RUN, Path::new("Cargo.toml"), &[set]) {
                resolved.to_json();
            }
        }
    }
}
