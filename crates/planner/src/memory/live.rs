//! [`Live`]: the tensors that are alive as a pass goes, and the most bytes that there were.

/// What a tensor belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Activations and gradients outside the experts.
    Plain,
    /// Rows on their way to, in and from the experts.
    Moe,
    /// Logits.
    Logits,
}

/// A tensor as the account sees it: `rows x width` elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tensor {
    /// What it is.
    pub name: &'static str,
    /// What it belongs to.
    pub part: Part,
    /// Rows; 0 where there is no such tensor.
    pub rows: f64,
    /// Elements of a row.
    pub width: f64,
    /// Bytes of an element.
    pub each: f64,
}

impl Tensor {
    /// Its bytes.
    pub fn bytes(&self) -> f64 {
        self.rows * self.width * self.each
    }

    /// The same tensor, or none of it.
    pub(super) fn only_if(self, there: bool) -> Tensor {
        if there { self } else { Tensor { rows: 0.0, ..self } }
    }
}

/// Bytes by [`Part`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Bytes {
    /// Of [`Part::Plain`].
    pub plain: f64,
    /// Of [`Part::Moe`].
    pub moe: f64,
    /// Of [`Part::Logits`].
    pub logits: f64,
}

impl Bytes {
    /// All of them.
    pub fn all(&self) -> f64 {
        self.plain + self.moe + self.logits
    }

    pub(super) fn add(&mut self, part: Part, bytes: f64) {
        match part {
            Part::Plain => self.plain += bytes,
            Part::Moe => self.moe += bytes,
            Part::Logits => self.logits += bytes,
        }
    }
}

/// Tensors that come and go.
#[derive(Debug, Default)]
pub struct Live {
    now: Bytes,
    peak: Bytes,
    steps: usize,
    peak_step: usize,
    /// Where a replay stops, and what it holds there.
    stop: Option<(usize, Vec<Tensor>)>,
}

impl Live {
    /// What `pass` needs at its fullest moment, beyond what was there when it began.
    pub fn peak(pass: impl Fn(&mut Live)) -> Bytes {
        let mut live = Live::default();
        pass(&mut live);
        live.peak
    }

    /// The tensors that `pass` holds at its fullest moment. Of those that were there when it began, the ones already gone have
    /// negative rows.
    pub fn at_peak(pass: impl Fn(&mut Live)) -> Vec<Tensor> {
        let mut first = Live::default();
        pass(&mut first);
        let mut again = Live { stop: Some((first.peak_step, Vec::new())), ..Live::default() };
        pass(&mut again);
        again.stop.map_or(Vec::new(), |(_, held)| held)
    }

    /// A tensor comes to life.
    pub fn hold(&mut self, x: Tensor) -> Tensor {
        self.steps += 1;
        self.now.add(x.part, x.bytes());
        if self.now.all() > self.peak.all() {
            (self.peak, self.peak_step) = (self.now, self.steps);
        }
        if let Some((until, held)) = &mut self.stop
            && self.steps <= *until
            && x.rows > 0.0
        {
            held.push(x);
        }
        x
    }

    /// A tensor is gone; also one that was there before the pass began.
    pub fn free(&mut self, x: Tensor) {
        self.now.add(x.part, -x.bytes());
        if let Some((until, held)) = &mut self.stop
            && self.steps < *until
            && x.rows > 0.0
        {
            match held.iter().rposition(|h| *h == x) {
                Some(i) => drop(held.remove(i)),
                None => held.push(Tensor { rows: -x.rows, ..x }),
            }
        }
    }

    /// Several come to life.
    pub fn hold_all<const N: usize>(&mut self, all: [Tensor; N]) {
        all.into_iter().for_each(|x| {
            self.hold(x);
        });
    }

    /// Several are gone.
    pub fn free_all<const N: usize>(&mut self, all: [Tensor; N]) {
        all.into_iter().for_each(|x| self.free(x));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fullest_moment_is_found_and_its_tensors_named() {
        let x = |name, rows| Tensor { name, part: Part::Plain, rows, width: 10.0, each: 2.0 };
        let pass = |live: &mut Live| {
            let a = live.hold(x("a", 3.0));
            live.free(x("earlier", 2.0));
            let b = live.hold(x("b", 4.0));
            live.free(a);
            live.hold(x("c", 1.0));
            live.free(b);
        };
        assert_eq!(Live::peak(pass).all(), 20.0 * (3.0 - 2.0 + 4.0));
        assert_eq!(Live::at_peak(pass), [x("a", 3.0), x("earlier", -2.0), x("b", 4.0)]);
    }
}
