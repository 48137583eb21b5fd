//! What all collectives must give, wherever the tensors live: between threads, over TCP and between GPUs.

use temper_comm::{Comm, Reduce};
use temper_tensor::{DType, Ops, Tensor, View};

/// A whole number that no other rank and place nearby has; sums of 16 ranks' are exact in every type.
pub fn value(rank: usize, i: usize) -> f64 {
    (rank * 5 + i % 5) as f64 - 3.0
}

/// Moves whole numbers to and from the backend.
pub struct Numbers<'o> {
    pub ops: &'o dyn Ops,
    pub dtype: DType,
}

impl Numbers<'_> {
    pub fn up(&self, values: &[f64], shape: &[usize]) -> Tensor {
        use half::bf16;
        match self.dtype {
            DType::F32 => self.ops.from_host(View::host(&values.iter().map(|x| *x as f32).collect::<Vec<_>>(), shape)),
            DType::BF16 => self.ops.from_host(View::host(&values.iter().map(|x| bf16::from_f64(*x)).collect::<Vec<_>>(), shape)),
            DType::I32 => self.ops.from_host(View::host(&values.iter().map(|x| *x as i32).collect::<Vec<_>>(), shape)),
            other => panic!("{other} is not tested"),
        }
        .unwrap()
    }

    pub fn down(&self, x: View) -> Vec<f64> {
        let x = self.ops.to_host(x).unwrap();
        match self.dtype {
            DType::F32 => x.as_slice::<f32>().unwrap().iter().map(|x| f64::from(*x)).collect(),
            DType::BF16 => x.as_slice::<half::bf16>().unwrap().iter().map(|x| x.to_f64()).collect(),
            DType::I32 => x.as_slice::<i32>().unwrap().iter().map(|x| f64::from(*x)).collect(),
            other => panic!("{other} is not tested"),
        }
    }

    /// Rank `rank`'s `len` numbers.
    pub fn of(&self, rank: usize, len: usize) -> Tensor {
        self.up(&(0..len).map(|i| value(rank, i)).collect::<Vec<_>>(), &[len])
    }
}

/// Every collective on buffers of `4 scale` elements a rank, in several types, against its definition.
pub fn check_collectives(comm: &dyn Comm, ops: &dyn Ops, scale: usize) {
    for dtype in [DType::F32, DType::BF16, DType::I32] {
        let numbers = Numbers { ops, dtype };
        reductions(comm, &numbers, scale);
        moves(comm, &numbers, scale);
        rows(comm, &numbers);
    }
    comm.barrier().unwrap();
}

fn reductions(comm: &dyn Comm, x: &Numbers, scale: usize) {
    let (n, rank) = (comm.size(), comm.rank());
    let (part, len) = (4 * scale, 4 * scale * n);
    let sum = |i: usize| -> f64 { (0..n).map(|r| value(r, i)).sum() };
    // Lengths that do not divide are allowed where the whole result stays with everyone.
    for len in [0, 1, len, len + 1] {
        let mut t = x.of(rank, len);
        comm.all_reduce(t.view_mut(), Reduce::Sum).unwrap().wait().unwrap();
        assert_eq!(x.down(t.view()), (0..len).map(sum).collect::<Vec<_>>());
        let mut t = x.of(rank, len);
        comm.all_reduce(t.view_mut(), Reduce::Max).unwrap().wait().unwrap();
        assert_eq!(x.down(t.view()), (0..len).map(|i| value(n - 1, i)).collect::<Vec<_>>());
    }
    let own = rank * part..(rank + 1) * part;
    let want: Vec<f64> = own.clone().map(sum).collect();
    let mut out = x.up(&vec![0.0; part], &[part]);
    comm.reduce_scatter(out.view_mut(), x.of(rank, len).view()).unwrap().wait().unwrap();
    assert_eq!(x.down(out.view()), want);

    let mut t = x.of(rank, len);
    comm.reduce_scatter_in_place(t.view_mut()).unwrap().wait().unwrap();
    assert_eq!(x.down(t.view())[own], want);
    comm.all_gather_in_place(t.view_mut()).unwrap().wait().unwrap();
    assert_eq!(x.down(t.view()), (0..len).map(sum).collect::<Vec<_>>());
}

fn moves(comm: &dyn Comm, x: &Numbers, scale: usize) {
    let (n, rank) = (comm.size(), comm.rank());
    let len = 4 * scale;
    let mut gathered = x.up(&vec![0.0; n * len], &[n * len]);
    comm.all_gather(gathered.view_mut(), x.of(rank, len).view()).unwrap().wait().unwrap();
    assert_eq!(x.down(gathered.view()), (0..n * len).map(|i| value(i / len, i % len)).collect::<Vec<_>>());

    let mut t = x.of(rank, len);
    comm.broadcast(t.view_mut(), n - 1).unwrap().wait().unwrap();
    assert_eq!(x.down(t.view()), (0..len).map(|i| value(n - 1, i)).collect::<Vec<_>>());

    // Around the ring; the first sends first, so that an order that needs one of the two to begin is served.
    let (next, before) = ((rank + 1) % n, (rank + n - 1) % n);
    let (own, mut from_before) = (x.of(rank, len), x.of(0, len));
    if rank == 0 {
        comm.send(own.view(), next).unwrap().wait().unwrap();
    }
    comm.recv(from_before.view_mut(), before).unwrap().wait().unwrap();
    if rank > 0 {
        comm.send(own.view(), next).unwrap().wait().unwrap();
    }
    assert_eq!(x.down(from_before.view()), (0..len).map(|i| value(before, i)).collect::<Vec<_>>());
}

/// Rank r sends r + to rows to rank `to`, each row [r, to]: from rank 0 to itself goes nothing.
fn rows(comm: &dyn Comm, x: &Numbers) {
    let (n, rank) = (comm.size(), comm.rank());
    let send: Vec<usize> = (0..n).map(|to| rank + to).collect();
    let receive: Vec<usize> = (0..n).map(|from| from + rank).collect();
    let sent: Vec<f64> = (0..n).flat_map(|to| [rank as f64, to as f64].repeat(send[to])).collect();
    let total: usize = receive.iter().sum();
    let mut out = x.up(&vec![0.0; total * 2], &[total, 2]);
    let sent = x.up(&sent, &[send.iter().sum(), 2]);
    comm.all_to_all(out.view_mut(), &receive, sent.view(), &send).unwrap().wait().unwrap();
    let want: Vec<f64> = (0..n).flat_map(|from| [from as f64, rank as f64].repeat(receive[from])).collect();
    assert_eq!(x.down(out.view()), want);
}
