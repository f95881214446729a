// naga includes Apple's header of this name and uses nothing of it.
