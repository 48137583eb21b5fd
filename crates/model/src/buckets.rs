//! Tensors that hold parameters: one each on a single rank, and many together where ranks exchange them, so that few large
//! messages do for all ([`Slots`]).

use crate::param::{Param, ParamId};
use crate::{Error, Result};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use temper_comm::Pending;
use temper_tensor::{Tensor, View, ViewMut};

/// Parameters that share a bucket begin at multiples of this many elements: on any device a good address for a matrix.
pub const ALIGN: usize = 128;

/// Where a parameter lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slot {
    /// The parameter's name.
    name: String,
    /// Its shape.
    shape: Vec<usize>,
    /// The bucket.
    pub bucket: usize,
    /// Its elements within the flattened bucket.
    pub range: Range<usize>,
}

impl Slot {
    /// The parameter's name.
    pub fn name(&self) -> &str {
        &self.name
    }
}

/// Which parameters share a bucket, and where in it each lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slots {
    slots: Vec<Slot>,
    /// Shape of the tensor of each bucket.
    shapes: Vec<Vec<usize>>,
}

impl Slots {
    /// A bucket for each parameter, in its shape.
    pub fn apart(params: &[Param]) -> Slots {
        let slot = |(i, p): (usize, &Param)| Slot { name: p.name.clone(), shape: p.shape.clone(), bucket: i, range: 0..p.numel() };
        Slots { slots: params.iter().enumerate().map(slot).collect(), shapes: params.iter().map(|p| p.shape.clone()).collect() }
    }

    /// Tensors of the parameters listed, in that order, each as long as the next multiple of its number of elements. Every
    /// parameter is in one of them.
    ///
    /// # Errors
    /// Names the first parameter that is in none.
    pub fn packed(params: &[Param], buckets: &[(Vec<ParamId>, usize)]) -> Result<Slots> {
        let mut slots: Vec<Option<Slot>> = vec![None; params.len()];
        let mut shapes = Vec::with_capacity(buckets.len());
        for (bucket, (ids, multiple)) in buckets.iter().enumerate() {
            let mut end = 0usize;
            for id in ids {
                let param = &params[id.0];
                let start = end.next_multiple_of(ALIGN);
                end = start + param.numel();
                slots[id.0] = Some(Slot { name: param.name.clone(), shape: param.shape.clone(), bucket, range: start..end });
            }
            shapes.push(vec![end.next_multiple_of(*multiple)]);
        }
        let placed = slots.into_iter().zip(params).map(|(slot, param)| slot.ok_or_else(|| Error::Undeclared(param.name.clone())));
        Ok(Slots { slots: placed.collect::<Result<_>>()?, shapes })
    }

    /// Where a parameter lies.
    pub fn slot(&self, id: ParamId) -> &Slot {
        &self.slots[id.0]
    }

    /// Shape of the tensor of each bucket: with several parameters it is flat.
    pub fn shapes(&self) -> &[Vec<usize>] {
        &self.shapes
    }

    /// The parameters of a bucket, in the order of declaration.
    pub fn in_bucket(&self, bucket: usize) -> impl Iterator<Item = ParamId> {
        self.slots.iter().enumerate().filter(move |(_, slot)| slot.bucket == bucket).map(|(i, _)| ParamId(i))
    }

    /// Number of parameters.
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }
}

/// A tensor and the operation between ranks that may be under way on it. Whoever looks at the elements waits for that first.
struct Bucket {
    tensor: Tensor,
    under_way: Mutex<Option<Pending<'static>>>,
}

impl Bucket {
    fn wait(&self) -> Result<()> {
        let pending = self.under_way.lock().unwrap_or_else(PoisonError::into_inner).take();
        Ok(pending.map_or(Ok(()), Pending::wait)?)
    }
}

impl Drop for Bucket {
    fn drop(&mut self) {
        // The memory must outlive the operation; whether that went well is of no interest any more.
        let _ = self.wait();
    }
}

/// The buckets of all weights, or of all gradients.
pub(crate) struct Tensors {
    slots: Arc<Slots>,
    buckets: Vec<Option<Bucket>>,
}

impl Tensors {
    /// Without tensors.
    pub fn empty(slots: Arc<Slots>) -> Tensors {
        Tensors { buckets: slots.shapes.iter().map(|_| None).collect(), slots }
    }

    /// With tensors that `make` makes from their shape.
    pub fn filled(slots: Arc<Slots>, make: impl Fn(&[usize]) -> temper_tensor::Result<Tensor>) -> Result<Tensors> {
        let mut all = Tensors::empty(slots);
        for (bucket, shape) in all.buckets.iter_mut().zip(&all.slots.shapes) {
            *bucket = Some(Bucket { tensor: make(shape)?, under_way: Mutex::default() });
        }
        Ok(all)
    }

    pub fn slots(&self) -> &Arc<Slots> {
        &self.slots
    }

    /// Takes a tensor over for a parameter that has a bucket of its own, or gives it back.
    pub fn replace(&mut self, id: ParamId, tensor: Tensor) -> Option<Tensor> {
        let Slot { bucket, .. } = self.slots.slots[id.0];
        if self.slots.shapes[bucket] != tensor.shape() || self.slots.in_bucket(bucket).count() > 1 {
            return Some(tensor);
        }
        self.buckets[bucket] = Some(Bucket { tensor, under_way: Mutex::default() });
        None
    }

    pub fn get(&self, id: ParamId) -> Result<View<'_>> {
        let Slot { name, shape, bucket, range } = &self.slots.slots[id.0];
        let bucket = self.buckets[*bucket].as_ref().ok_or_else(|| Error::MissingWeights(name.clone()))?;
        bucket.wait()?;
        let len = bucket.tensor.numel();
        Ok(bucket.tensor.view().reshape(&[len]).slice_rows(range.clone()).reshape(shape))
    }

    pub fn get_mut(&mut self, id: ParamId) -> Result<ViewMut<'_>> {
        let Slot { name, shape, bucket, range } = &self.slots.slots[id.0];
        let bucket = self.buckets[*bucket].as_mut().ok_or_else(|| Error::MissingWeights(name.clone()))?;
        Ok(flat(bucket)?.slice_rows(range.clone()).reshape(shape))
    }

    /// The elements of all parameters at once, in the order of declaration.
    pub fn all_mut(&mut self) -> Result<Vec<ViewMut<'_>>> {
        let slots = &self.slots;
        let mut views: Vec<Option<ViewMut<'_>>> = (0..slots.len()).map(|_| None).collect();
        for (bucket, tensor) in self.buckets.iter_mut().enumerate() {
            let mut own: Vec<ParamId> = slots.in_bucket(bucket).collect();
            own.sort_by_key(|id| slots.slot(*id).range.start);
            let Some(tensor) = tensor else { continue };
            let (mut rest, mut at) = (flat(tensor)?, 0);
            for id in own {
                let range = &slots.slot(id).range;
                let (here, tail) = rest.split_rows(range.start - at).1.split_rows(range.len());
                (rest, at) = (tail, range.end);
                views[id.0] = Some(here);
            }
        }
        let missing = |id: usize| Error::MissingWeights(slots.slot(ParamId(id)).name().to_string());
        views.into_iter().enumerate().map(|(id, view)| view.ok_or_else(|| missing(id))).collect()
    }

    /// Two different parameters at once.
    pub fn get_pair_mut(&mut self, a: ParamId, b: ParamId) -> Result<(ViewMut<'_>, ViewMut<'_>)> {
        let (x, y) = (&self.slots.slots[a.0], &self.slots.slots[b.0]);
        let none = || Error::Undeclared(format!("pair {} and {}", x.name, y.name));
        let swapped = (x.bucket, x.range.start) > (y.bucket, y.range.start);
        let (first, second) = if swapped { (y, x) } else { (x, y) };
        let (one, two) = if x.bucket == y.bucket {
            let bucket = flat(self.buckets[x.bucket].as_mut().ok_or_else(none)?)?;
            if first.range.end > second.range.start {
                return Err(none());
            }
            let (one, two) = bucket.split_rows(second.range.start);
            (one.slice_rows(first.range.clone()), two.slice_rows(0..second.range.len()))
        } else {
            let [one, two] = self.buckets.get_disjoint_mut([first.bucket, second.bucket]).map_err(|_| none())?;
            let (one, two) = (flat(one.as_mut().ok_or_else(none)?)?, flat(two.as_mut().ok_or_else(none)?)?);
            (one.slice_rows(first.range.clone()), two.slice_rows(second.range.clone()))
        };
        let (one, two) = (one.reshape(&first.shape), two.reshape(&second.shape));
        Ok(if swapped { (two, one) } else { (one, two) })
    }

    /// All elements of a bucket.
    pub fn bucket_mut(&mut self, bucket: usize) -> Result<ViewMut<'_>> {
        let bucket = self.buckets[bucket].as_mut().ok_or_else(|| Error::MissingWeights(format!("bucket {bucket}")))?;
        flat(bucket)
    }

    /// Begins an operation between ranks on a bucket.
    pub fn exchange(&mut self, bucket: usize, start: impl for<'a> FnOnce(ViewMut<'a>) -> temper_comm::Result<Pending<'a>>) -> Result<()> {
        let bucket = self.buckets[bucket].as_mut().ok_or_else(|| Error::MissingWeights(format!("bucket {bucket}")))?;
        // The bucket keeps its tensor alive and lets nobody at it until the operation was waited for.
        let pending = start(flat(bucket)?)?.detach();
        *bucket.under_way.get_mut().unwrap_or_else(PoisonError::into_inner) = Some(pending);
        Ok(())
    }
}

fn flat(bucket: &mut Bucket) -> Result<ViewMut<'_>> {
    bucket.wait()?;
    let len = bucket.tensor.numel();
    Ok(bucket.tensor.view_mut().reshape(&[len]))
}
