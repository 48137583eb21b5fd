//! What the committing rank refuses: parts that do not make up the model.

use super::common::snapshot;
use super::ranks::*;
use std::{fs, ops::Range};
use temper_checkpoint::Kind;
use temper_model::param::Param;
use temper_tensor::DType;
use tempfile::tempdir;

/// A save of step 6 on four ranks with one rank's entries tampered with fails on all ranks alike and leaves step 3 alone.
#[track_caller]
fn refused(tamper: impl Fn(&mut Entries) + Sync, words: &[&str]) {
    let root = tempdir().unwrap();
    let job = Job::new(root.path(), arch(false, true, 20), DType::F32);
    let layout = Layout { tp: 2, dp: 2, ep: 2, cuts: 5, ..Layout::ONE };
    job.save(&layout, 3).into_iter().for_each(|r| drop(r.unwrap()));
    let before = snapshot(&job.dir());
    let results = job.save_hooked(&layout, 6, |_| None, &|rank, entries| {
        if rank == 1 {
            tamper(entries);
        }
    });
    for result in results {
        let error = result.unwrap_err().to_string();
        for word in words {
            assert!(error.contains(word), "{word:?} is not in: {error}");
        }
    }
    assert_eq!(snapshot(&job.dir()), before);
    assert_eq!(fs::read_dir(job.store().dir()).unwrap().count(), 1, "the temporary folder is gone");
    job.assert_resumes(&layout, 3);
}

/// The first entry of rank 1 that is not empty.
fn some(entries: &mut Entries) -> &mut (Kind, Param, Range<usize>) {
    entries.iter_mut().find(|e| e.0 == Kind::ExpAvg && e.2.len() > 2 && e.1.name.contains("o_proj.weight")).unwrap()
}

#[test]
fn a_missing_element_is_named() {
    refused(|e| some(e).2.end -= 1, &["exp_avg of model.layers.0.self_attn.o_proj.weight", "are missing"]);
    refused(|e| some(e).2.start += 1, &["exp_avg of model.layers.0.self_attn.o_proj.weight", "are missing"]);
}

#[test]
fn an_element_written_twice_is_named_with_its_writers() {
    let twice = |e: &mut Entries| {
        let entry = some(e).clone();
        e.push(entry);
    };
    refused(twice, &["exp_avg of model.layers.0.self_attn.o_proj.weight", "written twice, by ranks 1 and 1"]);
}

#[test]
fn whole_tensors_that_are_missing_or_unknown_are_named() {
    refused(|e| e.retain(|e| !(e.0 == Kind::Weight && e.1.name == "lm_head.weight")), &["weight of lm_head.weight", "missing"]);
    refused(|e| some(e).1.pieces[0].name = "elsewhere".into(), &["rank 1 wrote elsewhere, which the model does not have"]);
    refused(|e| some(e).1.pieces[0].shape = vec![9, 8], &["rank 1 wrote it as part of shape [9, 8], the model has [8, 8]"]);
}

/// Norms are the same on every tensor rank: all of them saving theirs would write each twice.
#[test]
fn copies_on_the_tensor_axis_are_saved_by_one_rank() {
    let layout = Layout { tp: 4, ..Layout::ONE };
    let held = held(&arch(false, false, 20), &layout, 1);
    let own = |name: &str| {
        let param = held.params.iter().find(|p| p.name.contains(name)).unwrap();
        temper_checkpoint::store::own_ranges(param, &(0..param.numel()), 1)
    };
    assert!(own("input_layernorm").is_empty());
    // Four ranks share two key/value heads, so rank 1 saves its query head only: 2 rows of 8.
    assert_eq!(own("qkv_proj.weight"), vec![0..16]);
}
