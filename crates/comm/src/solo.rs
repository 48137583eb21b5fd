//! A group of one rank. Nothing to do in place; copies are left to the caller, who has no need of them.

use crate::{Comm, Error, Pending, Reduce, Result, World};
use std::sync::Arc;
use temper_tensor::{View, ViewMut};

/// The group of one.
pub struct Solo;

impl Solo {
    fn copies<'a>() -> Result<Pending<'a>> {
        Err(Error::Call { place: "a group of one rank".into(), what: "there is nobody to exchange with: check Comm::size first".into() })
    }
}

impl World for Solo {
    fn rank(&self) -> usize {
        0
    }
    fn size(&self) -> usize {
        1
    }
    fn group(&self, _: &str, _: &[usize]) -> Result<Arc<dyn Comm>> {
        Ok(Arc::new(Solo))
    }
}

impl Comm for Solo {
    fn rank(&self) -> usize {
        0
    }
    fn size(&self) -> usize {
        1
    }
    fn all_reduce<'a>(&self, _: ViewMut<'a>, _: Reduce) -> Result<Pending<'a>> {
        Ok(Pending::done())
    }
    fn all_gather<'a>(&self, _: ViewMut<'a>, _: View<'a>) -> Result<Pending<'a>> {
        Solo::copies()
    }
    fn all_gather_in_place<'a>(&self, _: ViewMut<'a>) -> Result<Pending<'a>> {
        Ok(Pending::done())
    }
    fn reduce_scatter<'a>(&self, _: ViewMut<'a>, _: View<'a>) -> Result<Pending<'a>> {
        Solo::copies()
    }
    fn reduce_scatter_in_place<'a>(&self, _: ViewMut<'a>) -> Result<Pending<'a>> {
        Ok(Pending::done())
    }
    fn all_to_all<'a>(&self, _: ViewMut<'a>, _: &[usize], _: View<'a>, _: &[usize]) -> Result<Pending<'a>> {
        Solo::copies()
    }
    fn broadcast<'a>(&self, _: ViewMut<'a>, _: usize) -> Result<Pending<'a>> {
        Ok(Pending::done())
    }
    fn send<'a>(&self, _: View<'a>, _: usize) -> Result<Pending<'a>> {
        Solo::copies()
    }
    fn recv<'a>(&self, _: ViewMut<'a>, _: usize) -> Result<Pending<'a>> {
        Solo::copies()
    }
    fn barrier(&self) -> Result<()> {
        Ok(())
    }
}
