//! The check before a commit: what all ranks wrote is the whole model, every element of it once.

use super::{
    super::Kind,
    FORMAT, Fragment, Named,
    record::{Index, Record, TensorEntry},
};
use crate::error::some_of;
use rayon::prelude::*;
use std::collections::{HashMap, HashSet};
use temper_model::param::Param;

/// Name and shape of a logical tensor.
pub(crate) type Declared = (String, Vec<usize>);

/// The logical tensors of a whole model.
pub(crate) fn declared(whole: &[Param]) -> Vec<Declared> {
    whole.iter().flat_map(|p| &p.pieces).map(|p| (p.name.clone(), p.shape.clone())).collect()
}

/// Puts together what the ranks wrote.
///
/// # Errors
/// In words: which elements of which tensor are missing or there twice, and who wrote them; tensors that the model has not, or not in
/// this shape; ranks that wrote one tensor in different types.
pub(crate) fn index(step: usize, declared: &[Declared], records: &[Record]) -> Result<Index, String> {
    let mut written: HashMap<(&str, Kind), Vec<&Named>> = HashMap::new();
    for named in records.iter().flat_map(|r| &r.fragments) {
        written.entry((&named.tensor, named.kind)).or_default().push(named);
    }
    let names: HashSet<&str> = declared.iter().map(|d| d.0.as_str()).collect();
    if let Some(unknown) = records.iter().flat_map(|r| &r.fragments).find(|n| !names.contains(n.tensor.as_str())) {
        return Err(format!("rank {} wrote {}, which the model does not have", unknown.fragment.rank, unknown.tensor));
    }
    // Weights without moments are a checkpoint too; moments of some tensors only are not.
    let kinds: Vec<Kind> = Kind::ALL.into_iter().filter(|k| *k == Kind::Weight || written.keys().any(|w| w.1 == *k)).collect();
    let all: Vec<(&Declared, Kind)> = kinds.iter().flat_map(|k| declared.iter().map(move |d| (d, *k))).collect();
    let checked: Vec<Result<TensorEntry, String>> = all
        .par_iter()
        .map(|((name, shape), kind)| one(name, shape, *kind, written.get(&(name.as_str(), *kind)).map_or(&[], Vec::as_slice)))
        .collect();
    let (mut tensors, mut wrong) = (Vec::with_capacity(checked.len()), Vec::new());
    for entry in checked {
        match entry {
            Ok(tensor) => tensors.push(tensor),
            Err(why) => wrong.push(why),
        }
    }
    if wrong.is_empty() { Ok(Index { format: FORMAT, step, ranks: records.len(), tensors }) } else { Err(some_of(&wrong)) }
}

/// One tensor of one kind.
fn one(name: &str, shape: &[usize], kind: Kind, written: &[&Named]) -> Result<TensorEntry, String> {
    let numel: usize = shape.iter().product();
    let Some(first) = written.first() else { return Err(format!("{kind} of {name}: all {numel} elements are missing")) };
    for other in written {
        let who = other.fragment.rank;
        if other.shape != shape {
            return Err(format!("{kind} of {name}: rank {who} wrote it as part of shape {:?}, the model has {shape:?}", other.shape));
        }
        if other.dtype != first.dtype {
            let (rank, dtype) = (first.fragment.rank, &first.dtype);
            return Err(format!("{kind} of {name}: rank {rank} wrote {dtype}, rank {who} {}", other.dtype));
        }
    }
    let fragments: Vec<Fragment> = written.iter().map(|n| n.fragment.clone()).collect();
    let mut runs: Vec<(usize, usize, usize)> =
        fragments.iter().flat_map(|f| f.runs(shape).map(move |r| (r.disk, r.disk + r.len, f.rank))).collect();
    runs.sort_unstable();
    let (mut covered, mut last) = (0, first.fragment.rank);
    for (start, end, rank) in runs.into_iter().chain([(numel, numel, usize::MAX)]) {
        if start > covered {
            return Err(format!("{kind} of {name}: elements {covered}..{start} of {numel} are missing"));
        }
        if start < covered {
            let twice = covered.min(end);
            return Err(format!("{kind} of {name}: elements {start}..{twice} of {numel} were written twice, by ranks {last} and {rank}"));
        }
        (covered, last) = (end, rank);
    }
    Ok(TensorEntry { name: name.into(), kind, shape: shape.into(), dtype: first.dtype.clone(), fragments })
}
