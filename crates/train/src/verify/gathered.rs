//! [`Gathered`]: tensors of the whole model, put together from what each rank has of them.

use crate::{Error, Result};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};
use temper_model::param::{Param, ParamId};

/// A value for every element of the whole model, given by the ranks that have it; where several have it, they must have the same bits.
pub(crate) struct Gathered {
    ids: HashMap<String, (ParamId, usize)>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// By parameter of the whole model, flattened; empty until some element is given, NaN where none was.
    tensors: HashMap<ParamId, Vec<f32>>,
    copies: Copies,
}

/// What several ranks have.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Copies {
    /// Elements that came once more.
    pub values: usize,
    /// Of these with other bits.
    pub unequal: usize,
}

impl Gathered {
    /// Of the whole model with these parameters, nothing yet.
    pub fn new(whole: &[Param]) -> Gathered {
        let ids = whole.iter().enumerate().map(|(i, p)| (p.name.clone(), (ParamId(i), p.numel()))).collect();
        Gathered { ids, state: Mutex::default() }
    }

    /// Which parameter of the whole model one of a rank's is a part of, and how many elements that has.
    ///
    /// # Errors
    /// When it is none.
    pub fn whole(&self, param: &Param) -> Result<(ParamId, usize)> {
        self.ids.get(&param.name).copied().ok_or_else(|| Error::Model(temper_model::Error::Undeclared(param.name.clone())))
    }

    /// Parameters of the whole model.
    pub fn params(&self) -> usize {
        self.ids.len()
    }

    /// Takes the values of elements `range` of what a rank holds of a parameter, flattened.
    pub fn put(&self, param: &Param, range: Range<usize>, values: &[f32]) -> Result<()> {
        let (id, numel) = self.whole(param)?;
        let State { tensors, copies } = &mut *self.lock();
        let whole = tensors.entry(id).or_insert_with(|| vec![f32::NAN; numel]);
        for piece in &param.pieces {
            for run in piece.runs() {
                let (start, end) = (run.memory.max(range.start), (run.memory + run.len).min(range.end));
                for at in start..end.max(start) {
                    let (held, new) = (&mut whole[piece.whole.start + run.disk + (at - run.memory)], values[at - range.start]);
                    if !held.is_nan() {
                        copies.values += 1;
                        copies.unequal += usize::from(held.to_bits() != new.to_bits());
                    }
                    *held = new;
                }
            }
        }
        Ok(())
    }

    /// Elements `range` of a whole parameter; NaN where no rank had them, nothing where none was asked for.
    pub fn get(&self, id: ParamId, range: Range<usize>) -> Option<Vec<f64>> {
        self.lock().tensors.get(&id).map(|t| t[range].iter().map(|v| f64::from(*v)).collect())
    }

    /// What several ranks had.
    pub fn copies(&self) -> Copies {
        self.lock().copies
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use temper_config::{Arch, ModelType};
    use temper_model::{AxisRank, Model, Portion, Seat, declare};

    fn arch() -> Arch {
        Arch {
            model_type: ModelType::Qwen3,
            hidden: 4,
            layers: 1,
            heads: 4,
            kv_heads: 2,
            head_dim: 2,
            intermediate: 4,
            vocab: 7,
            norm_eps: 1e-6,
            rope_theta: 1e4,
            max_positions: 8,
            tied: false,
            qkv_bias: true,
            out_bias: false,
            mlp_bias: false,
            qk_norm: true,
            moe: None,
            init_std: 0.1,
            dtype: None,
            bos: None,
            eos: Vec::new(),
            notices: Vec::new(),
        }
    }

    /// The whole parameters filled with their own indices, of which each rank gives what it holds.
    #[test]
    fn parts_of_ranks_make_the_whole_and_unequal_copies_are_counted() {
        let whole = declare(&arch());
        let gathered = Gathered::new(&whole);
        for rank in 0..4 {
            let seat = Seat { tp: AxisRank { rank, of: 4 }, ..Seat::WHOLE };
            let part = Model::part(&arch(), &Portion { seat, ..Portion::whole(&arch()) }).unwrap();
            for param in &part.params {
                let own = |piece: &temper_model::param::Piece| {
                    let start = piece.whole.start;
                    piece.runs().flat_map(move |r| (0..r.len).map(move |i| (start + r.disk + i) as f32)).collect::<Vec<f32>>()
                };
                let values: Vec<f32> = param.pieces.iter().flat_map(own).collect();
                let cut = values.len() / 3;
                gathered.put(param, 0..cut, &values[..cut]).unwrap();
                gathered.put(param, cut..values.len(), &values[cut..]).unwrap();
            }
        }
        for (i, param) in whole.iter().enumerate() {
            let values = gathered.get(ParamId(i), 0..param.numel()).unwrap();
            assert_eq!(values, (0..param.numel()).map(|i| i as f64).collect::<Vec<_>>(), "{}", param.name);
        }
        let before = gathered.copies();
        // Norms lie on four ranks, keys and values on two.
        let norms: usize = whole.iter().filter(|p| p.name.contains("norm")).map(Param::numel).sum();
        assert_eq!((before.values, before.unequal), (3 * norms + 2 * 4 * (4 + 1), 0));
        gathered.put(&whole[1], 1..3, &[1.0, 2.5]).unwrap();
        assert_eq!((gathered.copies().values - before.values, gathered.copies().unequal), (2, 1));
    }
}
