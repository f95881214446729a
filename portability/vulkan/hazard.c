// A program with one mistake: it fills a buffer twice without a barrier between. A validation layer that checks
// synchronisation must say so; one that stays silent checks nothing.
#include <stdio.h>
#include <stdlib.h>
#include <vulkan/vulkan.h>

static void need(VkResult result, const char *what) {
    if (result != VK_SUCCESS) {
        fprintf(stderr, "%s: %d\n", what, result);
        exit(2);
    }
}

int main(void) {
    VkApplicationInfo app = {.sType = VK_STRUCTURE_TYPE_APPLICATION_INFO, .apiVersion = VK_API_VERSION_1_1};
    VkInstanceCreateInfo instance_info = {.sType = VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO, .pApplicationInfo = &app};
    VkInstance instance;
    need(vkCreateInstance(&instance_info, NULL, &instance), "instance");

    VkPhysicalDevice physical;
    uint32_t n = 1;
    VkResult found = vkEnumeratePhysicalDevices(instance, &n, &physical);
    need(found == VK_INCOMPLETE ? VK_SUCCESS : found, "physical device");

    float priority = 1.0f;
    VkDeviceQueueCreateInfo queue_info = {
        .sType = VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO, .queueCount = 1, .pQueuePriorities = &priority};
    VkDeviceCreateInfo device_info = {
        .sType = VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO, .queueCreateInfoCount = 1, .pQueueCreateInfos = &queue_info};
    VkDevice device;
    need(vkCreateDevice(physical, &device_info, NULL, &device), "device");
    VkQueue queue;
    vkGetDeviceQueue(device, 0, 0, &queue);

    VkBufferCreateInfo buffer_info = {
        .sType = VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO, .size = 1024, .usage = VK_BUFFER_USAGE_TRANSFER_DST_BIT};
    VkBuffer buffer;
    need(vkCreateBuffer(device, &buffer_info, NULL, &buffer), "buffer");
    VkMemoryRequirements wanted;
    vkGetBufferMemoryRequirements(device, buffer, &wanted);
    uint32_t type = 0;
    while (!(wanted.memoryTypeBits >> type & 1)) type++;
    VkMemoryAllocateInfo memory_info = {
        .sType = VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO, .allocationSize = wanted.size, .memoryTypeIndex = type};
    VkDeviceMemory memory;
    need(vkAllocateMemory(device, &memory_info, NULL, &memory), "memory");
    need(vkBindBufferMemory(device, buffer, memory, 0), "binding");

    VkCommandPoolCreateInfo pool_info = {.sType = VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO};
    VkCommandPool pool;
    need(vkCreateCommandPool(device, &pool_info, NULL, &pool), "pool");
    VkCommandBufferAllocateInfo commands_info = {
        .sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO, .commandPool = pool, .commandBufferCount = 1};
    VkCommandBuffer commands;
    need(vkAllocateCommandBuffers(device, &commands_info, &commands), "commands");
    VkCommandBufferBeginInfo begin = {.sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO};
    need(vkBeginCommandBuffer(commands, &begin), "begin");
    vkCmdFillBuffer(commands, buffer, 0, 1024, 1);
    vkCmdFillBuffer(commands, buffer, 0, 1024, 2);
    need(vkEndCommandBuffer(commands), "end");
    VkSubmitInfo submit = {
        .sType = VK_STRUCTURE_TYPE_SUBMIT_INFO, .commandBufferCount = 1, .pCommandBuffers = &commands};
    need(vkQueueSubmit(queue, 1, &submit, VK_NULL_HANDLE), "submit");
    need(vkDeviceWaitIdle(device), "wait");

    vkDestroyCommandPool(device, pool, NULL);
    vkDestroyBuffer(device, buffer, NULL);
    vkFreeMemory(device, memory, NULL);
    vkDestroyDevice(device, NULL);
    vkDestroyInstance(instance, NULL);
    return 0;
}
