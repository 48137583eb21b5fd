//! What is exchanged begins when it can and is waited for when it must: seen by a group that takes notes.

mod tiny;

use std::sync::{Arc, Mutex};
use temper_comm::{Comm, Pending, Reduce, Result, Work};
use temper_model::param::{Block, ParamId};
use temper_model::{Grads, Model, Ranks, Weights};
use temper_parallel::{AdamWConfig, Buckets, Optimizer};
use temper_tensor::{DType, Ops, View, ViewMut, cpu::Cpu};
use tiny::*;

/// An operation by its number.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Event {
    Begun(&'static str, usize),
    Waited(&'static str, usize),
}
use Event::{Begun, Waited};

#[derive(Clone, Default)]
struct Notes(Arc<Mutex<Vec<Event>>>);

impl Notes {
    fn push(&self, event: Event) {
        self.0.lock().unwrap().push(event);
    }

    /// What happened since the last call.
    fn take(&self) -> Vec<Event> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

/// A group whose operations in place are done when they are waited for, as far as one can see.
struct Noted {
    inner: Arc<dyn Comm>,
    notes: Notes,
    count: Mutex<usize>,
}

struct Wait(Notes, Event);

impl Work for Wait {
    fn wait(self: Box<Self>) -> Result<()> {
        self.0.push(self.1);
        Ok(())
    }
}

impl Noted {
    fn begin<'a>(&self, what: &'static str, done: Pending<'a>) -> Result<Pending<'a>> {
        done.wait()?;
        let mut count = self.count.lock().unwrap();
        self.notes.push(Begun(what, *count));
        *count += 1;
        Ok(Pending::new(Box::new(Wait(self.notes.clone(), Waited(what, *count - 1)))))
    }
}

impl Comm for Noted {
    fn rank(&self) -> usize {
        self.inner.rank()
    }
    fn size(&self) -> usize {
        self.inner.size()
    }
    fn all_reduce<'a>(&self, x: ViewMut<'a>, op: Reduce) -> Result<Pending<'a>> {
        self.inner.all_reduce(x, op)
    }
    fn all_gather<'a>(&self, out: ViewMut<'a>, x: View<'a>) -> Result<Pending<'a>> {
        self.inner.all_gather(out, x)
    }
    fn all_gather_in_place<'a>(&self, x: ViewMut<'a>) -> Result<Pending<'a>> {
        self.begin("gather", self.inner.all_gather_in_place(x)?)
    }
    fn reduce_scatter<'a>(&self, out: ViewMut<'a>, x: View<'a>) -> Result<Pending<'a>> {
        self.inner.reduce_scatter(out, x)
    }
    fn reduce_scatter_in_place<'a>(&self, x: ViewMut<'a>) -> Result<Pending<'a>> {
        self.begin("sum", self.inner.reduce_scatter_in_place(x)?)
    }
    fn all_to_all<'a>(&self, out: ViewMut<'a>, receive: &[usize], x: View<'a>, send: &[usize]) -> Result<Pending<'a>> {
        self.inner.all_to_all(out, receive, x, send)
    }
    fn broadcast<'a>(&self, x: ViewMut<'a>, root: usize) -> Result<Pending<'a>> {
        self.inner.broadcast(x, root)
    }
    fn send<'a>(&self, x: View<'a>, to: usize) -> Result<Pending<'a>> {
        self.inner.send(x, to)
    }
    fn recv<'a>(&self, x: ViewMut<'a>, from: usize) -> Result<Pending<'a>> {
        self.inner.recv(x, from)
    }
    fn barrier(&self) -> Result<()> {
        self.inner.barrier()
    }
}

/// The first parameter of a block.
fn first(model: &Model, block: Block) -> ParamId {
    ParamId(model.params.iter().position(|p| p.block() == block).unwrap())
}

#[test]
fn exchanges_begin_early_and_end_late() {
    // Both ranks have a part of every bucket.
    let arch = temper_config::Arch { vocab: 40, ..dense(false) };
    on_ranks(&arch, Layout { axes: axes(1, 1, 2, 1, 1), ..Layout::ONE }, |mut ranks: Ranks| {
        let notes = Notes::default();
        ranks.mesh.dp = Arc::new(Noted { inner: ranks.mesh.dp.clone(), notes: notes.clone(), count: Mutex::new(0) });
        let ops = Cpu::new(1);
        let model = part(&arch, &ranks);
        let buckets = Buckets::new(&model, &ranks).unwrap();
        let mut weights = Weights::alloc(buckets.slots(), DType::F32, &ops).unwrap();
        let mut grads = Grads::zeros_in(buckets.slots(), DType::F32, &ops).unwrap();
        let adamw = AdamWConfig { betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1, clip: 1.0 };
        let mut optimizer = Optimizer::new(&ops, buckets, DType::F32, DType::F32, false, adamw).unwrap();
        for (i, param) in model.params.iter().enumerate() {
            ops.fill(weights.get_mut(ParamId(i)).unwrap(), param.numel() as f64).unwrap();
        }
        for _ in 0..2 {
            // Buckets: embedding, two layers, head. Gradients of the head come first.
            grads.begin();
            ops.fill(grads.sum_into(first(&model, Block::Head)).unwrap().0, 0.5).unwrap();
            assert!(notes.take().is_empty());
            optimizer.ready(&ops, &mut grads, Block::Head).unwrap();
            let Some(&Begun("sum", at)) = notes.take().first() else { panic!("the sum of the head's gradients has not begun") };
            let late = grads.sum_into(first(&model, Block::Head)).map(|_| ()).unwrap_err();
            assert!(late.to_string().contains("after its sum over ranks was begun"), "{late}");
            ops.fill(grads.sum_into(first(&model, Block::Layer(1))).unwrap().0, 0.25).unwrap();
            optimizer.ready(&ops, &mut grads, Block::Layer(1)).unwrap();
            assert_eq!(notes.take(), [Begun("sum", at + 1)], "nothing is waited for in the backward pass");
            optimizer.reduce(&ops, &mut grads).unwrap();
            assert_eq!(notes.take(), [Begun("sum", at + 2), Begun("sum", at + 3)]);
            optimizer.measure(&ops, &grads, std::iter::empty()).unwrap();
            let mut waited = notes.take();
            waited.sort_by_key(|e| if let Waited(_, n) = e { *n } else { usize::MAX });
            assert_eq!(waited, [0, 1, 2, 3].map(|n| Waited("sum", at + n)), "the norm waits for all");

            optimizer.step(&ops, &mut weights, &grads, 1e-2).unwrap();
            assert!(optimizer.settle(&ops).unwrap().updated);
            let gather = at + 4;
            assert_eq!(notes.take(), [0, 1, 2, 3].map(|n| Begun("gather", gather + n)), "weights are gathered in the order of their use");
            weights.get(first(&model, Block::Embedding)).unwrap();
            assert_eq!(notes.take(), [Waited("gather", gather)]);
            weights.get(first(&model, Block::Embedding)).unwrap();
            weights.get(first(&model, Block::Layer(1))).unwrap();
            assert_eq!(notes.take(), [Waited("gather", gather + 2)], "only the layer in use is waited for");
            // The next update touches all of them.
            for block in [Block::Layer(0), Block::Head] {
                weights.get_mut(first(&model, block)).unwrap();
            }
            assert_eq!(notes.take(), [Waited("gather", gather + 1), Waited("gather", gather + 3)]);
        }
        optimizer.step(&ops, &mut weights, &grads, 1e-2).unwrap();
        assert_eq!(notes.take().len(), 4);
        drop(weights);
        assert_eq!(notes.take().len(), 4, "memory is not given back before operations on it are done");
    });
}
