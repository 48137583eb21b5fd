//! What of a step is done for nothing because its numbers do not divide. It is no fault: fillers complete what is missing.

use crate::advice::Advice;
use crate::job::Job;
use crate::layout::Layout;
use crate::units::thousands;

/// What fillers cost on a legal layout, in words. Nothing where everything divides.
pub fn waste(layout: &Layout, job: &Job) -> Vec<Advice> {
    [replicas(layout, job), interleaving(layout, job), tokens(layout, job)].into_iter().flatten().collect()
}

/// Replicas that have fewer micro-batches than others, or none.
fn replicas(l: &Layout, job: &Job) -> Option<Advice> {
    let (micro_batches, dp) = (l.micro_batches(job.global_batch), l.dp);
    if dp > micro_batches {
        let found = format!("{} of {dp} replicas have nothing to train: a step has {micro_batches} micro-batches", dp - micro_batches);
        let lower = if l.micro_batch > 1 { "Lower train.micro_batch, raise" } else { "Raise" };
        return Some(Advice::hint(found, format!("{lower} train.global_batch, or take a smaller dp.")));
    }
    let slots = l.turns(job.global_batch).real.saturating_mul(dp);
    let fillers = slots.saturating_sub(micro_batches);
    (fillers > 0).then(|| {
        let found = format!(
            "{micro_batches} micro-batches do not divide over {dp} replicas: {fillers} of {slots} are fillers of one token, which waste {} of the step",
            percent(fillers as f64 / slots as f64)
        );
        let step = dp.saturating_mul(l.micro_batch);
        let near = [job.global_batch / step * step, job.global_batch.next_multiple_of(step)];
        Advice::hint(found, format!("A global batch of {} wastes nothing.", enough(l, near)))
    })
}

/// Fillers that complete the groups of an interleaved schedule.
fn interleaving(l: &Layout, job: &Job) -> Option<Advice> {
    let turns = l.turns(job.global_batch);
    (turns.all > turns.real).then(|| {
        let found = format!(
            "{} micro-batches are not a multiple of pp {}, in which interleaving runs them: {} fillers of one token complete them",
            turns.real,
            l.pp,
            turns.all - turns.real
        );
        let step = l.dp.saturating_mul(l.micro_batch).saturating_mul(l.pp);
        Advice::hint(found, format!("A global batch in multiples of {step} needs none."))
    })
}

/// Tokens that fill a micro-batch up, so that every rank has as many.
fn tokens(l: &Layout, job: &Job) -> Option<Advice> {
    let real = l.micro_batch as f64 * job.seq as f64;
    let fill = l.filled(real) - real;
    (fill > 0.0).then(|| {
        let found = format!(
            "{} tokens of a micro-batch are filled up with {fill} to divide over tp {} x cp {}: {} of the work",
            thousands(real),
            l.tp,
            l.cp,
            percent(fill / (real + fill))
        );
        let one = Layout { micro_batch: 1, ..l.clone() };
        Advice::hint(found, format!("Sequences of {} tokens are filled by none.", one.filled(job.seq as f64)))
    })
}

/// Those of some global batches that leave every stage of a pipeline work.
pub(crate) fn enough(l: &Layout, batches: [usize; 2]) -> String {
    let enough = batches.into_iter().filter(|batch| *batch > 0 && l.turns(*batch).real >= l.pp);
    enough.map(|batch| batch.to_string()).collect::<Vec<_>>().join(" or ")
}

fn percent(share: f64) -> String {
    let percent = 100.0 * share;
    if percent >= 0.1 { format!("{percent:.1} %") } else { "less than 0.1 %".to_string() }
}
