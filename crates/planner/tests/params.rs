//! Parameters of a rank against counts made by hand, and networks read from files.

mod common;

use common::*;
use std::path::Path;
use temper_planner::*;

fn rank(network: &Network, layout: &str, gpus: usize, stage: usize, account: Account) -> RankParams {
    let layout = LayoutRequest::parse(layout, "").unwrap().complete(gpus, network.arch.moe.is_some());
    rank_params(network, &layout, &stages(network, &layout).unwrap()[stage], account)
}

#[test]
fn one_rank_holds_everything() {
    for name in BUILTIN {
        let network = network(name);
        for account in [Account::Temper, Account::Megatron] {
            assert_eq!(rank(&network, "tp=1", 1, 0, account).total(), network.total, "{name}");
        }
    }
}

#[test]
fn a_dense_model_by_hand() {
    // Qwen3-8B, tp 2, pp 4: nine layers a stage.
    let network = network("Qwen3-8B");
    let attention = (4096 + 2 * 1024) * 4096 / 2 + 4096 * 4096 / 2 + 2 * 128;
    let layer = attention + 3 * 4096 * 12_288 / 2 + 2 * 4096;
    let vocabulary = 151_936 * 4096 / 2;
    let of = |stage| rank(&network, "tp=2,pp=4", 8, stage, Account::Temper);
    assert_eq!(of(0).total(), 9 * layer + vocabulary);
    assert_eq!(of(1).total(), 9 * layer);
    assert_eq!(of(3).total(), 9 * layer + vocabulary + 4096);
    assert_eq!(of(3).head, vocabulary + 4096);
}

#[test]
fn a_tied_head_on_another_stage_needs_a_copy_of_the_embedding() {
    let network = network("Qwen3-0.6B");
    let vocabulary = 151_936 * 1024;
    let sum = |pp: &str, stages: usize| (0..stages).map(|s| rank(&network, pp, stages, s, Account::Temper).total()).sum::<u64>();
    assert_eq!(sum("pp=1", 1), network.total);
    assert_eq!(sum("pp=4", 4), network.total + vocabulary);
}

/// Each rank needs whole heads: with more ranks than key/value heads, temper copies them.
#[test]
fn key_and_value_heads_are_copied_beyond_their_number() {
    let network = network("Qwen3-235B-A22B");
    let layers = |tp: usize, account| rank(&network, &format!("tp={tp},ep=1,etp=1"), tp, 0, account).layers;
    // One layer's share, by hand: q and o by tp, one key and one value head, the router and the norms whole.
    let by_hand = |tp: u64, heads: u64| 94 * (2 * 8192 * 4096 / tp + 2 * heads * 128 * 4096 + 128 * 4096 + 2 * 128 + 2 * 4096);
    assert_eq!(layers(4, Account::Temper), by_hand(4, 1));
    assert_eq!(layers(8, Account::Temper), by_hand(8, 1));
    assert_eq!(layers(16, Account::Temper), by_hand(16, 1));
    // Megatron divides the rows below a head.
    assert_eq!(layers(8, Account::Megatron), by_hand(8, 1) - 94 * 128 * 4096);
}

/// Every parameter of an expert lies on exactly one rank of its group.
#[test]
fn experts_are_divided_without_rest() {
    let network = network("Qwen3-30B-A3B");
    let all = 48 * 128 * 3 * 2048 * 768;
    for (ep, etp) in [(1, 1), (8, 1), (4, 2), (2, 4), (1, 8)] {
        let one = rank(&network, &format!("tp=4,ep={ep},etp={etp}"), 8, 0, Account::Temper);
        assert_eq!(one.experts * ep * etp, all, "ep {ep} etp {etp}");
    }
}

#[test]
fn the_optimizer_is_sharded_over_replicas() {
    let network = network("Qwen3-30B-A3B");
    let layout = LayoutRequest::parse("tp=2,ep=4,etp=1", "").unwrap().complete(16, true);
    let params = rank_params(&network, &layout, &stages(&network, &layout).unwrap()[0], Account::Temper);
    assert_eq!(layout.expert_dp(), 4);
    assert_eq!(params.optimizer_shard(&layout), params.dense().div_ceil(8) + params.experts.div_ceil(4));
}

#[test]
fn uneven_and_virtual_stages_hold_every_layer_once() {
    let network = network("Qwen3.5-35B-A3B");
    for layout in ["pp=4", "pp=4,vpp=2", "pp=2,vpp=5", "pp=3,split=14/13/13", "pp=2,vpp=2,split=22/18"] {
        let layout = LayoutRequest::parse(layout, "").unwrap().complete(4, true);
        let stages = stages(&network, &layout).unwrap();
        assert_eq!(stages.iter().map(|s| s.layers).sum::<usize>(), 40, "{layout}");
        let total: u64 = stages.iter().map(|s| rank_params(&network, &layout, s, Account::Temper).total()).sum();
        assert_eq!(total, network.total, "{layout}");
    }
}

/// Llama with scaled RoPE, sliding windows and quantised copies are counted, and the engine's refusal is kept.
#[test]
fn what_the_engine_refuses_is_still_counted() {
    let llama = r#"{"model_type":"llama","hidden_size":64,"num_hidden_layers":2,"num_attention_heads":4,"intermediate_size":128,"vocab_size":100,
        "rope_scaling":{"rope_type":"llama3","factor":8.0},"quantization_config":{"bits":4}}"#;
    let network = Network::from_json(llama, Path::new("config.json")).unwrap();
    assert_eq!(network.total, 2 * (100 * 64) + 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64));
    assert!(network.refused.unwrap().contains("quantization_config"));
    let hybrid = Network::builtin("Qwen/Qwen3-Next-80B-A3B-Instruct").unwrap().unwrap();
    assert!(hybrid.refused.unwrap().contains("qwen3_next"));
    assert_eq!(Network::builtin("qwen3-8b").unwrap().unwrap().refused, None);
    assert!(Network::builtin("gpt-5").is_none());
}

#[test]
fn nonsense_is_named_and_never_panics() {
    let base = |extra: &str| {
        format!(
            r#"{{"model_type":"qwen3_5_moe","text_config":{{"hidden_size":64,"num_hidden_layers":4,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":16,
            "vocab_size":100,"num_experts":4,"num_experts_per_tok":2,"moe_intermediate_size":32{extra}}}}}"#
        )
    };
    let read = |text: &str| Network::from_json(text, Path::new("config.json"));
    assert!(read(&base("")).is_ok());
    for (extra, key) in [
        (r#","linear_num_key_heads":0"#, "linear_num_key_heads"),
        (r#","linear_num_value_heads":33"#, "linear_num_value_heads"),
        (r#","linear_key_head_dim":1e99"#, "linear_key_head_dim"),
        (r#","layer_types":["full_attention"]"#, "layer_types"),
        (r#","layer_types":[1,2,3,4]"#, "layer_types"),
        (r#","attn_output_gate":3"#, "attn_output_gate"),
        (r#","shared_expert_intermediate_size":-1"#, "shared_expert_intermediate_size"),
        (r#","full_attention_interval":"x""#, "full_attention_interval"),
    ] {
        let error = read(&base(extra)).unwrap_err().to_string();
        assert!(error.contains(key), "{error}");
    }
    for text in ["", "[]", "{}", "{\"model_type\":3}", "{\"model_type\":\"qwen3_5\",\"text_config\":7}", "{\"model_type\":\"mamba\"}"] {
        assert!(read(text).is_err(), "{text}");
    }
    let wide =
        base(r#","linear_num_key_heads":4096,"linear_num_value_heads":4096,"linear_key_head_dim":4096,"linear_value_head_dim":4096"#);
    assert!(read(&wide.replace("\"hidden_size\":64", "\"hidden_size\":1048576")).unwrap_err().to_string().contains("parameters"));
    let many = r#"{"model_type":"qwen3_moe","hidden_size":1,"num_hidden_layers":10000,"num_attention_heads":1,"num_key_value_heads":1,"head_dim":2,
        "intermediate_size":1,"moe_intermediate_size":1,"vocab_size":1,"num_experts":60000,"num_experts_per_tok":1}"#;
    assert!(read(many).unwrap_err().to_string().contains("num_experts"));
}

/// The published configs, where they are at hand.
#[test]
fn real_configs_agree_with_the_built_in_ones() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/facts/configs");
    let Ok(entries) = std::fs::read_dir(&folder) else {
        println!("SKIPPED: {} is not there", folder.display());
        return;
    };
    let mut seen = 0;
    for path in entries.map(|e| e.unwrap().path()).filter(|p| p.extension().is_some_and(|x| x == "json")) {
        let file = path.file_name().unwrap().to_string_lossy().into_owned();
        let name = file.split(".config").next().unwrap();
        let real = Network::from_file(&path).unwrap_or_else(|e| panic!("{file}: {e}"));
        let Some(ours) = Network::builtin(name) else {
            println!("{name} is not built in");
            continue;
        };
        assert_eq!(
            (real.total, real.active),
            {
                let n = ours.unwrap();
                (n.total, n.active)
            },
            "{name}"
        );
        seen += 1;
    }
    assert!(seen >= 10, "{seen}");
}
