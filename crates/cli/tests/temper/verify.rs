//! `temper verify --layout`: a model over ranks, against golden values and against one rank.

use crate::models::{FIXTURES, fixture};
use crate::support::{Case, Done};

fn verify(case: &Case, name: &str, more: &[&str]) -> Done {
    let model = fixture(name);
    let args: Vec<&str> = ["verify", model.to_str().unwrap()].into_iter().chain(more.iter().copied()).collect();
    case.temper(&args)
}

#[test]
fn every_architecture_over_ranks_equals_its_golden_values_and_one_rank() {
    let case = Case::tiny();
    for name in FIXTURES {
        let layout = match name {
            "qwen3_moe" => "tp=2,pp=2,ep=2,etp=1,split=1/2",
            "qwen3_moe_sparse_step" => "tp=2,pp=2,vpp=2,ep=2,dp=2,recompute=full",
            "qwen3_dense" => "tp=2,cp=2,pp=3,sequence=false",
            _ => "tp=4,pp=2,dp=2",
        };
        let golden = fixture(name).join("golden.safetensors");
        let report = verify(&case, name, &["--golden", golden.to_str().unwrap(), "--layout", layout, "--json"]).ok().json();
        let plain = verify(&case, name, &["--golden", golden.to_str().unwrap(), "--json"]).ok().json();
        let names = |report: &serde_json::Value| -> Vec<String> {
            report["items"].as_array().unwrap().iter().map(|i| i["name"].as_str().unwrap().to_string()).collect()
        };
        assert_eq!((report["passes"].as_bool(), names(&report)), (Some(true), names(&plain)), "{name}");
        let ranks: u64 = layout.split(',').filter_map(|part| part.split_once('=')).fold(1, |all, (key, n)| match key {
            "tp" | "cp" | "pp" | "dp" => all * n.parse::<u64>().unwrap(),
            _ => all,
        });
        assert_eq!((report["ranks"].as_u64(), plain["ranks"].as_u64()), (Some(ranks), Some(1)), "{name}");
        verify(&case, name, &["--layout", layout]).ok().says(&[
            &format!("{ranks} ranks, threads on the processor, compared with one rank"),
            "largest relative error  beyond the noise",
            "items within 1e-5",
        ]);
    }
}

#[test]
fn one_wrong_golden_number_is_found_by_ranks_too() {
    const ITEM: &str = "grad/model.layers.2.mlp.experts.down_proj";
    let case = Case::tiny();
    let report = crate::models::changed_with(&case, &["--layout", "tp=2,pp=2,ep=2,split=1/2"], |golden| {
        let bytes = &mut golden.get_mut(ITEM).unwrap().bytes;
        let size = |at: &usize| f32::from_le_bytes([bytes[*at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]).abs();
        // Of the last expert, which the second rank of ep has, the largest element, changed by a quarter at least.
        let largest = (bytes.len() / 8 * 7..bytes.len()).step_by(4).max_by(|a, b| size(a).total_cmp(&size(b))).unwrap();
        bytes[largest + 2] ^= 0x40;
    });
    let report = report.exits(1).json();
    let items = report["items"].as_array().unwrap();
    let wrong = items.iter().filter(|i| i["error"].as_f64().is_none_or(|e| e > 1e-4));
    assert_eq!(wrong.map(|i| i["name"].as_str().unwrap()).collect::<Vec<_>>(), [ITEM]);
}

#[test]
fn layouts_that_do_not_fit_are_refused_with_a_remedy() {
    let case = Case::tiny();
    for (name, layout, said) in [
        ("qwen3_dense", "tp=3", &["tp 3 does not divide 4 attention heads", "Take tp among 1, 2, 4"][..]),
        ("qwen3_dense", "pp=2", &["3 layers do not divide over pp 2", "split=2/1"]),
        ("qwen3_dense", "pp=2,split=2/2", &["split"]),
        ("qwen3_dense", "pp=2,split=2+1", &["split=2/1"]),
        ("qwen3_dense", "pp=4", &["pp 4 x vpp 1 stages for 3 layers", "nearest legal layouts:"]),
        ("qwen3_dense", "ep=2", &["has no experts", "Take ep=1"]),
        ("qwen3_moe", "ep=3", &["ep 3 does not divide 8 experts"]),
        ("qwen3_moe", "etp=3", &["etp 3 does not divide the width 32"]),
        ("qwen3_moe", "ep=4,dp=2", &["does not divide the 2 ranks of a stage"]),
        ("qwen3_moe", "vpp=3", &["vpp 3 without a pipeline"]),
        ("qwen3_moe", "dp=2000", &["2000 ranks", "1024"]),
        ("qwen3_moe", "tp=2,tp=2", &["tp", "given twice"]),
        ("qwen3_moe", "sequence=off", &["sequence", "Expected true or false"]),
        ("qwen3_moe", "zp=2", &["zp", "unknown"]),
        ("qwen3_moe", "mb=2", &["mb"]),
    ] {
        verify(&case, name, &["--layout", layout]).exits(2).says(said);
    }
    verify(&case, "qwen3_dense", &[]).exits(2).says(&["--golden"]);
    verify(&case, "qwen3_dense", &["--layout", "tp=2", "--device", "cuda"])
        .exits(2)
        .says(&["--device cuda", "as threads on the processor, not on GPUs"]);
}

/// Where ranks have fewer tokens than pieces, fillers complete them; and etp that is not given is tp.
#[test]
fn more_pieces_than_tokens_are_filled_up() {
    let case = Case::tiny();
    verify(&case, "llama", &["--layout", "cp=32"])
        .ok()
        .says(&["32 ranks, threads on the processor, compared with one rank", "items within 1e-5"]);
    verify(&case, "qwen3_moe", &["--layout", "tp=2,ep=2"]).ok().says(&["layout tp=2,pp=1,ep=2,etp=2,dp=2: 4 ranks", "items within 1e-5"]);
}
